"""[run]: what the run is called, where it lives, how long it goes."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from vime_hpc.config.section import PathText, Section


class RunSection(Section):
    """What the run is called, where it lives, how long it goes."""

    dir: PathText = "runs/default"
    """Run directory; everything the run writes lies below it, and it may be moved between attempts."""
    seed: NonNegativeInt = 1
    """Root of every random number: prompt order, sampling seeds, initialisation."""
    num_steps: PositiveInt = 100
    """Trainer steps in all, over every attempt."""
    mode: Literal["train", "train_only", "rollout_only"] = "train"
    """train: both loops; train_only: trainer on a finished buffer; rollout_only: generate without training."""
    until: PositiveInt | None = None
    """Stop before this step and leave the learning-rate schedule as num_steps sets it; none = num_steps."""
    train_from: PathText = ""
    """With train_only: the run directory whose buffer is trained on, only read; empty = this run's own."""
    share_with_group: bool = False
    """Let the Unix group read the run directory (umask 027 instead of 077)."""
    wait_timeout_s: PositiveFloat = 1800.0
    """Longest wait for another role (a batch, a weight version) before the job stops with the missing one's name."""
    startup_timeout_s: PositiveFloat = 600.0
    """Longest wait for every role to come up."""

    @property
    def end_step(self) -> int:
        """The first step that is not trained any more."""
        return self.num_steps if self.until is None else min(self.until, self.num_steps)
