"""What a rollout worker takes over from the start before: where the prompts stood, and which groups need no generating."""

from __future__ import annotations

from vime_hpc.buffer.reader import BufferReader
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.rollout.source import PromptSource
from vime_hpc.types import PromptGroup


def restore_source(source: PromptSource, writer: BufferWriter) -> None:
    """Continue behind the last commit, whatever number of workers made it: what each had used is shared out anew.

    Raises:
        ConfigError: the prompts, their order or the seed are others than then.
    """
    states = BufferReader(writer.layout.root).last_resume_states()
    if states:
        source.restore(states)


def open_groups(writer: BufferWriter, end_step: int) -> list[PromptGroup]:
    """Acknowledged groups of every step that is not committed, each once.

    More than one step can be open: a worker that has sealed its part goes on with the next step while another is still at
    work, and what a step leaves over lies in the journal of the next.
    """
    return [
        group
        for step in range(writer.next_step, end_step)
        for group in writer.recovered_groups(step)
    ]
