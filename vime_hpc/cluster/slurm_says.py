"""What Slurm's commands say of a job. A command that is not here, hangs or finds no controller is told from "no such job"."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from vime_hpc.errors import SlurmSilentError

COMMAND_TIMEOUT_S = 30.0
COMMENT_MARK = "vime-hpc "
"""What the last word of a batch script of ours begins with, in its job's comment."""
_UNKNOWN_JOB = "Invalid job id"
_QUESTIONS = (
    ("squeue", "-h", "-t", "all", "-o", "%i|%T|%N|%r|%S|%L|%k"),
    ("sacct", "-X", "-n", "-P", "-o", "JobID,State,NodeList,Reason,Start,Timelimit,Comment"),
)


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. One that does not answer in time ends with code 124, as under `timeout`."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        text = f"{words[0]} did not answer within {COMMAND_TIMEOUT_S:.0f} s"
        return subprocess.CompletedProcess(words, 124, "", text)


def job_end_time(environment: Mapping[str, str]) -> float | None:
    """When Slurm will end this job, seconds since 1970; None without a limit, or where Slurm cannot be asked.

    SLURM_JOB_END_TIME is set from Slurm 23.02 on; before that, and where the limit may have been changed since the
    start, scontrol knows. The batch script has asked it (VIME_JOB_END), since Python may run where there is none.
    """
    if asked := environment.get("VIME_JOB_END"):
        return float(asked)
    shown = show_job(environment.get("SLURM_JOB_ID", ""))
    if shown:
        try:
            return datetime.strptime(shown["EndTime"], "%Y-%m-%dT%H:%M:%S").timestamp()
        except (KeyError, ValueError):  # "Unknown", "NONE"
            return None
    text = environment.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdigit() and int(text) else None


def show_job(job_id: str) -> dict[str, str]:
    """`scontrol -o show job` of the (leading) job as a table; empty if Slurm does not know it or is not here."""
    if not job_id or not shutil.which("scontrol"):
        return {}
    answer = ask("scontrol", "-o", "show", "job", job_id)
    if answer.returncode or not answer.stdout.strip():
        return {}
    return dict(re.findall(r"(?:^|\s)([A-Za-z:/]+)=(\S*)", answer.stdout.splitlines()[0]))


# Worst first: a heterogeneous job is in the worst state that any of its components is in.
STATE_ORDER = (
    "FAILED",
    "BOOT_FAIL",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
    "DEADLINE",
    "CANCELLED",
    "PREEMPTED",
    "REVOKED",
    "REQUEUED",
    "PENDING",
    "CONFIGURING",
    "SUSPENDED",
    "STOPPED",
    "COMPLETING",
    "RUNNING",
    "COMPLETED",
)


@dataclass(frozen=True, slots=True)
class JobState:
    """What Slurm says of a job, all its components taken together."""

    job_id: str
    state: str
    nodes: str
    reason: str = ""
    start: str = ""
    time_left: str = ""
    comment: str = ""

    @property
    def last_word(self) -> str:
        """What the batch script left in the job's comment; empty where nothing, or where the site keeps none."""
        ours = self.comment.startswith(COMMENT_MARK)
        return self.comment.removeprefix(COMMENT_MARK) if ours else ""


def read_states(text: str) -> dict[str, JobState]:
    """Lines `id|state|nodes|reason|start|time left|comment` of squeue or sacct, by leader job (`7+1` counts for 7)."""
    found: dict[str, JobState] = {}
    for line in text.splitlines():
        job, state, nodes, *rest = (line.split("|", 6) + [""] * 6)[:7]
        leader, word = job.partition("+")[0], (state.split() or ["UNKNOWN"])[0]
        known = found.get(leader)
        joined = ",".join(filter(None, [known.nodes if known else "", nodes]))
        if known is None or _badness(word) < _badness(known.state):
            found[leader] = JobState(leader, word, joined, *rest)
        else:
            found[leader] = replace(known, nodes=joined)
    return found


def job_state(job_id: str) -> JobState | None:
    """squeue's answer, else sacct's; None where neither knows the job (or Slurm is not here).

    Raises:
        SlurmSilentError: squeue is here and gets no answer, and sacct does not know the job either.
    """
    trouble = ""
    for question in _QUESTIONS:
        if not shutil.which(question[0]):
            continue
        answer = ask(*question, f"--jobs={job_id}")
        states = read_states(answer.stdout) if answer.returncode == 0 else {}
        if job_id in states:
            return states[job_id]
        if question[0] == "squeue" and answer.returncode and _UNKNOWN_JOB not in answer.stderr:
            trouble = answer.stderr.strip() or f"squeue ended with {answer.returncode}"
    if trouble:
        raise SlurmSilentError(
            f"Slurm does not say whether job {job_id} runs ({trouble}); ask again when it answers"
        )
    return None


def waiting_jobs(job_ids: Sequence[str]) -> list[str]:
    """Those of these jobs that are in the queue and have not started; none where there is no squeue."""
    if not job_ids or not shutil.which("squeue"):
        return []
    answer = ask("squeue", "-h", "-t", "PENDING", "-o", "%i|%T|", f"--jobs={','.join(job_ids)}")
    return sorted(set(read_states(answer.stdout)) & set(job_ids))


def has_accounting() -> bool:
    """Whether sacct answers here (without slurmdbd it prints "accounting storage is disabled", rc 1)."""
    return bool(shutil.which("sacct")) and ask("sacct", "-n", "-X", "-S", "now").returncode == 0


def _badness(state: str) -> int:
    return STATE_ORDER.index(state) if state in STATE_ORDER else len(STATE_ORDER)
