"""Which buffer a train_only job trains on, and whether it is long enough. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from vime_hpc.buffer.reader import BufferReader
from vime_hpc.config.run import RunSection
from vime_hpc.errors import ConfigError


def training_buffer(run: RunSection, root: Path) -> Path:
    """The run directory whose buffer is trained on.

    Args:
        root: this run's own directory.
    """
    return Path(run.train_from or root).absolute()


def refuse_unfinished(run: RunSection, root: Path) -> None:
    """Nobody writes steps while a train_only job runs, so a missing one is not waited for.

    Raises:
        ConfigError: there is no buffer, or it ends before the last step to train.
    """
    source = training_buffer(run, root)
    reader = BufferReader(source)
    if reader.next_step < run.end_step:
        raise ConfigError(
            f'{reader.layout.root} is committed up to step {reader.next_step}, run.mode = "train_only" is to train '
            f"up to step {run.end_step} and generates nothing; set --run.until={reader.next_step}, or generate the "
            f"rest first: --run.mode=rollout_only --run.dir={source}"
        )
