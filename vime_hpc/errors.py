"""Every error vime_hpc raises on purpose, and the exit code it ends a command with.

VimeError                      1   anything that went wrong and is nobody's usage error
├── ConfigError                2   the user asked for something that cannot be (also a ValueError)
│   └── RunLockedError         2   another live job owns the run directory
├── DamagedDataError           3   data on disk is not what its own record says (also a ValueError)
│   ├── BufferCorruptError     3   a rollout segment, journal or step commit
│   ├── CheckpointCorruptError 3   a checkpoint or weight version
│   └── PromptDataError        3   a prompt file (file and physical line number)
├── NothingToDoError           4   the run is already complete
├── RequeueRequested          75   state is saved; submit the same command again
├── DeadlineError              1   a wait ran out; names the rank and the phase that was missing (also a TimeoutError)
├── SlurmSilentError           1   Slurm's controller does not answer
├── RoleDiedError              1   another process of the job ended
├── EngineError                1   an engine refused, failed or answered nonsense
│   └── EngineLostError        1   an engine that was there cannot be reached any more
└── WeightsMismatchError       1   the engine does not hold the trainer's weights
    └── PublishGivenUpError    1   the other side of the bridge gave up

All are built from one message, so they stay picklable (submitit returns them through a file).
"""

from __future__ import annotations


class VimeError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line ends with."""

    exit_code = 1
    consequence = False
    """Whether another process's end is the likely cause, so that its record tells more than this one's."""


class ConfigError(VimeError, ValueError):
    """A configuration or command line that cannot work; the user can mend it."""

    exit_code = 2


class RunLockedError(ConfigError):
    """A second job was started on a run directory that a live job owns."""


class DamagedDataError(VimeError, ValueError):
    """Data on disk contradicts its own record (digest, count, shape)."""

    exit_code = 3


class BufferCorruptError(DamagedDataError):
    """A segment, journal or step commit of the rollout buffer is damaged."""


class CheckpointCorruptError(DamagedDataError):
    """A checkpoint or a published weight version is damaged or incomplete."""


class PromptDataError(DamagedDataError):
    """A prompt file has a line that cannot be used; names the file and physical line."""


class NothingToDoError(VimeError):
    """The run has already done everything its configuration asks for."""

    exit_code = 4


class RequeueRequested(VimeError):
    """The job was told to stop, saved its state, and wants to be started again."""

    exit_code = 75


class DeadlineError(VimeError, TimeoutError):
    """A wait ran out of time; the message names the rank and the phase that was missing."""


class SlurmSilentError(VimeError):
    """Slurm's commands are here and get no answer; whether a job runs is then not known."""


class RoleDiedError(VimeError):
    """Another process of the same job ended, so this one cannot go on."""

    consequence = True


class EngineError(VimeError):
    """An inference engine refused a request, failed, or gave an answer that cannot be right."""


class EngineLostError(EngineError):
    """The connection to an engine is refused or lost: its end, which its host records, is the cause."""

    consequence = True


class WeightsMismatchError(VimeError):
    """The weights an engine received are not the ones the trainer sent."""


class PublishGivenUpError(WeightsMismatchError):
    """The other side of the bridge ended a publish; its own record says why."""

    consequence = True
