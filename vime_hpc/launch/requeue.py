"""What follows the end of a start: done, again, or stop. Decided on the batch side from what the tasks left behind.

srun's own exit code cannot be trusted (143 hides the cause), so the tasks' exit codes and failure records come first.
Pure but for reading those records.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from vime_hpc.config.cluster import ClusterConfig
from vime_hpc.errors import (
    ConfigError,
    DamagedDataError,
    NothingToDoError,
    RequeueRequested,
)
from vime_hpc.launch.attempts import Attempt, Cause

# Slurm may send the warning up to 60 s early (its manual), and saving takes a while on top of the agreed delay.
EARLY_S = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """exit_code is the batch script's: 0 or 4 done, 75 again, anything else stop."""

    verdict: Literal["done", "again", "stop"]
    cause: Cause
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a start left behind.

    Attributes:
        srun_code: of the first step that ended badly, else 0.
        exits: exit code per rank name; a task without one was killed with its shell.
        failure: the first failure record that is a cause, if any.
        forced: the batch script ended the tasks because the time limit came near.
        job_state: Slurm's state of the job now; anything but RUNNING means that Slurm itself is ending it.
        killed: the rank that died of a signal before any failure record was written.
        complete: nothing is left to do: every step is trained (or generated) and saved.
        warned: the tasks were told to stop in time to save (someone ended with 75).
    """

    srun_code: int
    exits: Mapping[str, int]
    world_size: int
    failure: Mapping[str, Any] | None
    forced: bool
    job_state: str = ""
    killed: str | None = None
    complete: bool = False

    @property
    def warned(self) -> bool:
        return RequeueRequested.exit_code in self.exits.values()


def decide(
    evidence: Evidence, attempt: Attempt, earlier: Sequence[Attempt], cluster: ClusterConfig
) -> Verdict:
    """The verdict on a start.

    Args:
        attempt: this one, its `ended` and `at_end` set.
        earlier: the ones before, in order.
    """
    codes = set(evidence.exits.values())
    everyone = len(evidence.exits) == evidence.world_size
    if everyone and codes == {0} and evidence.srun_code == 0:
        return Verdict("done", "finished", "every task ended well", 0)
    if (
        everyone
        and codes <= {0, NothingToDoError.exit_code}
        and NothingToDoError.exit_code in codes
    ):
        return Verdict(
            "done",
            "nothing to do",
            "nothing to do: the run is complete",
            NothingToDoError.exit_code,
        )
    if evidence.complete and not evidence.failure and _others_good(evidence):
        # told to stop amid the last step, which the trainer finishes
        return Verdict(
            "done", "finished", "every step is done and saved; told to stop meanwhile", 0
        )
    if evidence.job_state not in ("", "RUNNING"):
        # A cancelled job must stay away, one that was preempted, requeued by hand or lost a node comes back by itself.
        return Verdict(
            "stop",
            "killed from outside",
            f"Slurm is ending this job ({evidence.job_state}); what it requeues comes "
            f"back by itself",
            128 + signal.SIGTERM,
        )
    cause, reason = _cause(evidence, attempt)
    if cause == "cannot go on":
        return Verdict(
            "stop", cause, f"{reason}; starting again would end the same way", _code(evidence)
        )
    return _again_or_stop(cause, reason, attempt, earlier, cluster, _code(evidence))


def _cause(evidence: Evidence, attempt: Attempt) -> tuple[Cause, str]:
    failure = evidence.failure
    if failure and failure["exit_code"] in (ConfigError.exit_code, DamagedDataError.exit_code):
        return "cannot go on", _words(failure)
    if evidence.forced:
        return (
            "time limit",
            "the tasks had not stopped when the time limit came near, so they were ended by force",
        )
    if evidence.warned and not failure and _others_good(evidence):
        if (
            attempt.end_time
            and attempt.ended
            and attempt.ended > attempt.end_time - attempt.warning_s - EARLY_S
        ):
            return "time limit", "told to stop before the time limit; everything is saved"
        return "asked to stop", "told to stop (preemption, or USR2 by hand); everything is saved"
    if evidence.killed:
        return "crash", _died(evidence.killed, evidence.exits[evidence.killed])
    if failure:
        return "crash", _words(failure)
    bad = {
        name: code
        for name, code in sorted(evidence.exits.items())
        if code not in (0, RequeueRequested.exit_code)
    }
    if bad:
        name, code = min(bad.items(), key=lambda item: (item[1] == 128 + signal.SIGTERM, item[0]))
        return "crash", _died(name, code)
    missing = evidence.world_size - len(evidence.exits)
    if missing:
        return "crash", (
            f"{missing} of {evidence.world_size} tasks left no exit code (killed with their node or their shell), "
            f"srun's code is {evidence.srun_code}"
        )
    return "crash", f"srun ended with {evidence.srun_code}"


def _others_good(evidence: Evidence) -> bool:
    return (
        set(evidence.exits.values()) <= {0, RequeueRequested.exit_code}
        and len(evidence.exits) == evidence.world_size
    )


def _again_or_stop(
    cause: Cause,
    reason: str,
    attempt: Attempt,
    earlier: Sequence[Attempt],
    cluster: ClusterConfig,
    code: int,
) -> Verdict:
    if cluster.requeue == "never":
        return Verdict(
            "stop", cause, f'{reason}; cluster.requeue = "never": submit again to go on', code
        )
    if cause == "asked to stop":
        return Verdict("again", cause, reason, RequeueRequested.exit_code)
    if cause == "crash" and not cluster.restart_on_crash:
        return Verdict("stop", cause, f"{reason}; cluster.restart_on_crash is off", code)
    attempt = replace(attempt, cause=cause)
    idle = _without_progress(attempt, earlier)
    if idle > cluster.max_restarts_without_progress:
        return Verdict(
            "stop",
            cause,
            f"{reason}. {idle} starts in a row without a new step or checkpoint "
            f"(cluster.max_restarts_without_progress = {cluster.max_restarts_without_progress}): not starting again",
            code,
        )
    counted = sum(1 for a in [*earlier, attempt] if a.cause in ("crash", "time limit"))
    if cluster.max_restarts is not None and counted > cluster.max_restarts:
        return Verdict(
            "stop",
            cause,
            f"{reason}. cluster.max_restarts = {cluster.max_restarts} is used up",
            code,
        )
    return Verdict("again", cause, reason, RequeueRequested.exit_code)


def _without_progress(attempt: Attempt, earlier: Sequence[Attempt]) -> int:
    """Starts in a row, this one last, that ended by crash or limit and brought nothing. Preemption breaks no row."""
    count = 0
    for one in [attempt, *reversed(earlier)]:
        if one.made_progress:
            break
        if one.cause in ("crash", "time limit"):
            count += 1
    return count


def _code(evidence: Evidence) -> int:
    if evidence.failure:
        return int(evidence.failure["exit_code"]) or 1
    bad = [code for code in evidence.exits.values() if code not in (0, RequeueRequested.exit_code)]
    return (bad[0] if bad else evidence.srun_code) or 1


def _died(name: str, code: int) -> str:
    return f"{name} {how_it_ended(code)} without a failure record; see its log"


def _words(failure: Mapping[str, Any]) -> str:
    return f"{failure['rank']} on {failure['host']}: {failure['error']}: {failure['message']}"


def how_it_ended(code: int) -> str:
    """An exit code as a shell reports it, in words."""
    if code > 128:
        try:
            name = signal.Signals(code - 128).name
        except ValueError:
            return f"ended with exit code {code}"
        return f"was killed by {name}" + (
            " (out of memory, or by hand)" if name == "SIGKILL" else ""
        )
    return f"ended with exit code {code}"
