"""Which buffer a train_only job trains on, and whether all it needs is there. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from vime_hpc.buffer.reader import BufferReader, check_segment_file
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.run import RunSection
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError
from vime_hpc.launch.checkpoints import examine


def training_buffer(run: RunSection, root: Path) -> Path:
    """The run directory whose buffer is trained on.

    Args:
        root: this run's own directory.
    """
    return Path(run.train_from or root).absolute()


def refuse_unfinished(config: RunConfig, root: Path, first_step: int | None = None) -> None:
    """Nobody writes steps while a train_only job runs, so what is missing is not waited for.

    Looks at commits and at the sizes of files; what is inside them is checked when it is read.

    Args:
        root: this run's own directory.
        first_step: where training begins; none = behind the newest complete checkpoint of `root`.
    Raises:
        ConfigError: there is no buffer, it ends before the last step to train, or a step has too few prompt groups.
        BufferCorruptError: a commit is damaged, or a segment is missing or was cut.
    """
    source, end_step = training_buffer(config.run, root), config.run.end_step
    reader = BufferReader(source)
    if reader.next_step < end_step:
        raise ConfigError(
            f'{reader.layout.root} is committed up to step {reader.next_step}, run.mode = "train_only" is to train '
            f"up to step {end_step} and generates nothing: {end_step} steps wanted, {reader.next_step} available. Set "
            f"--run.until={reader.next_step}, or generate the rest first: --run.mode=rollout_only --run.dir={source}"
        )
    for step in range(_trained(root) if first_step is None else first_step, end_step):
        _refuse_incomplete(reader, step, config.rollout.prompts_per_step)


def _refuse_incomplete(reader: BufferReader, step: int, wanted: int) -> None:
    segments = [worker["segment"] for worker in reader.commit(step)["workers"]]
    available = sum(int(segment["num_groups"]) for segment in segments)
    if available < wanted:
        raise ConfigError(
            f"{reader.layout.commit(step)}: step {step} is too small for rollout.prompts_per_step: {wanted} prompt groups "
            f"wanted, {available} available, and nothing is generated here. Train on what there is with "
            f"--rollout.prompts_per_step={available}"
        )
    for segment in segments:
        check_segment_file(reader.layout, step, segment)


def _trained(root: Path) -> int:
    """The step behind the newest checkpoint that can be loaded."""
    states = examine(RunPaths(root).checkpoints, digests=False)
    return next((state.step for state in states if state.problem is None), 0)
