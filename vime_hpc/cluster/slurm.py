"""Slurm's environment to ranks, host lists and the time limit, for every launch shape. Needs no Slurm command for ranks.

A task's global rank is the first rank of its component plus its rank within its step. What Slurm's own numbers mean
depends on the shape: a step that spans all components counts through, a step of one component starts at 0. Checked
against Slurm 22.05; SLURM_JOB_NODELIST of a spanning step is sorted and not in rank order, so nothing here reads it
for an order, and SLURM_NTASKS is the step's in one shape and the job's in another, so SLURM_STEP_NUM_TASKS goes first.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from vime_hpc.errors import ConfigError

COMMAND_TIMEOUT_S = 30.0
COMMENT_MARK = "vime-hpc "
"""What the last word of a batch script of ours begins with, in its job's comment."""


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Where a task stands in the whole job, as far as Slurm's variables tell."""

    global_rank: int
    world_size: int
    local_rank: int
    job_id: str
    restart_count: int


def task_place(environment: Mapping[str, str]) -> TaskPlace:
    """This task's place, from its step's variables and what the batch script adds (VIME_COMPONENT, _COMPONENT_TASKS).

    Raises:
        ConfigError: started outside a step, or the numbers contradict each other; the message names both.
    """
    step_tasks, rank = _step(environment)
    sizes = _component_sizes(environment, step_tasks)
    component = _component(environment, sizes, step_tasks, rank)
    first = sum(sizes[:component])
    if step_tasks == sum(sizes):
        global_rank = rank
        if not first <= rank < first + sizes[component]:
            raise ConfigError(
                f"SLURM_PROCID={rank} is said to be in component {component}, whose ranks are {first}.."
                f"{first + sizes[component] - 1}; the components of srun are not in the order of the job's"
            )
    else:
        global_rank = first + rank
    return TaskPlace(
        global_rank,
        sum(sizes),
        _integer(environment, "SLURM_LOCALID", 0),
        environment["SLURM_JOB_ID"],
        _integer(environment, "SLURM_RESTART_COUNT", 0),
    )


def _step(environment: Mapping[str, str]) -> tuple[int, int]:
    """Tasks of this step and this task's rank in it."""
    if "SLURM_STEP_NUM_TASKS" not in environment and "SLURM_STEP_ID" not in environment:
        raise ConfigError(
            "this is the batch script, not a task: SLURM_STEP_ID is not set. Start the roles with srun"
        )
    tasks = _integer(environment, "SLURM_STEP_NUM_TASKS", _integer(environment, "SLURM_NTASKS", 1))
    rank = _integer(environment, "SLURM_PROCID", 0)
    if not 0 <= rank < tasks:
        raise ConfigError(
            f"SLURM_PROCID={rank} is outside the step's SLURM_STEP_NUM_TASKS={tasks}; a variable was "
            f"inherited from another step (srun inside srun?)"
        )
    per_node = re.match(r"\d+", environment.get("SLURM_NTASKS_PER_NODE", ""))
    ours = "VIME_COMPONENT" in environment or "SLURM_HET_SIZE" in environment
    if per_node and not ours and int(per_node[0]) > tasks:
        raise ConfigError(
            f"SLURM_NTASKS={tasks} but SLURM_NTASKS_PER_NODE={per_node[0]}: this step has fewer tasks than "
            f"one node was asked to hold; give srun the job's own --ntasks and --ntasks-per-node"
        )
    return tasks, rank


def _component_sizes(environment: Mapping[str, str], step_tasks: int) -> list[int]:
    if "VIME_COMPONENT_TASKS" in environment:
        return [int(size) for size in environment["VIME_COMPONENT_TASKS"].split(",")]
    count = _integer(environment, "SLURM_HET_SIZE", 0)
    if not count:
        return [step_tasks]
    names = [f"SLURM_NTASKS_HET_GROUP_{index}" for index in range(count)]
    missing = [name for name in names if name not in environment]
    if missing:
        raise ConfigError(
            f"SLURM_HET_SIZE={count} but {', '.join(missing)} is not set; give every component --ntasks or "
            f"--ntasks-per-node"
        )
    return [int(environment[name]) for name in names]


def _component(environment: Mapping[str, str], sizes: list[int], step_tasks: int, rank: int) -> int:
    """Which component this task is in. Slurm has no variable for it (22.05 to 24.11)."""
    spanning = step_tasks == sum(sizes)
    if "VIME_COMPONENT" in environment:
        component = int(environment["VIME_COMPONENT"])
        if component >= len(sizes):
            raise ConfigError(
                f"VIME_COMPONENT={component} but the job has {len(sizes)} components ({sizes})"
            )
        if not spanning and step_tasks != sizes[component]:
            raise ConfigError(
                f"SLURM_STEP_NUM_TASKS={step_tasks} is neither the job's {sum(sizes)} tasks nor the "
                f"{sizes[component]} of component {component}; srun's --ntasks and the script's layout differ"
            )
        return component
    if spanning:
        return next(index for index, end in enumerate(itertools.accumulate(sizes)) if rank < end)
    fitting = [index for index, size in enumerate(sizes) if size == step_tasks]
    if len(fitting) != 1:
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={step_tasks} does not say which component of {sizes} tasks this step is; "
            f"start it as `srun --het-group=I env VIME_COMPONENT=I ...`"
        )
    return fitting[0]


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number") from None


def expand_hosts(text: str) -> list[str]:
    """Slurm's host list grammar, in its order: `n[001-003,007],g[1-2]`, `r1i[0-1]n[2-3]`. No scontrol needed.

    Raises:
        ConfigError: the brackets do not close, or a range is not one.
    """
    hosts: list[str] = []
    for entry in _split_outside_brackets(text):
        parts = re.split(r"(\[[^\[\]]*\])", entry)
        if any("[" in part or "]" in part for part in parts[::2]):
            raise ConfigError(
                f"{text!r} is no Slurm host list: the brackets of {entry!r} do not match"
            )
        choices = [
            _expand_range(part[1:-1], text) if index % 2 else [part]
            for index, part in enumerate(parts)
        ]
        hosts.extend("".join(combination) for combination in itertools.product(*choices))
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    entries, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            entries.append(text[start:index])
            start = index + 1
    entries.append(text[start:])
    return [entry.strip() for entry in entries if entry.strip()]


def _expand_range(body: str, whole: str) -> list[str]:
    names = []
    for part in body.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ConfigError(
                f"{whole!r} is no Slurm host list: {part!r} is neither a number nor a range"
            )
        low, high = match[1], match[2] or match[1]
        names += [f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1)]
    return names


def component_hosts(environment: Mapping[str, str]) -> list[list[str]]:
    """Hosts of each component, in the job's own order; one list for a plain allocation."""
    count = _integer(environment, "SLURM_HET_SIZE", 0)
    if count:
        return [
            expand_hosts(environment[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"])
            for index in range(count)
        ]
    return [expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))]


def first_host(environment: Mapping[str, str]) -> str:
    """The first host of component 0: where global rank 0 runs."""
    return component_hosts(environment)[0][0]


def job_end_time(environment: Mapping[str, str]) -> float | None:
    """When Slurm will end this job, seconds since 1970; None without a limit, or where Slurm cannot be asked.

    SLURM_JOB_END_TIME is set from Slurm 23.02 on; before that, and where the limit may have been changed since the
    start, scontrol knows.
    """
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
    answer = subprocess.run(
        ["scontrol", "-o", "show", "job", job_id],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
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
    """squeue's answer, else sacct's; None where neither knows the job (or Slurm is not here)."""
    for command in (
        ["squeue", "-h", "-t", "all", "-o", "%i|%T|%N|%r|%S|%L|%k", f"--jobs={job_id}"],
        [
            "sacct",
            "-X",
            "-n",
            "-P",
            "-o",
            "JobID,State,NodeList,Reason,Start,Timelimit,Comment",
            f"--jobs={job_id}",
        ],
    ):
        if not shutil.which(command[0]):
            continue
        answer = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        states = read_states(answer.stdout) if answer.returncode == 0 else {}
        if job_id in states:
            return states[job_id]
    return None


def waiting_jobs(job_ids: Sequence[str]) -> list[str]:
    """Those of these jobs that are in the queue and have not started; none where there is no squeue."""
    if not job_ids or not shutil.which("squeue"):
        return []
    command = ["squeue", "-h", "-t", "PENDING", "-o", "%i|%T|", f"--jobs={','.join(job_ids)}"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    return sorted(set(read_states(answer.stdout)) & set(job_ids))


def has_accounting() -> bool:
    """Whether sacct answers here (without slurmdbd it prints "accounting storage is disabled", rc 1)."""
    if not shutil.which("sacct"):
        return False
    return (
        subprocess.run(
            ["sacct", "-n", "-X", "-S", "now"], capture_output=True, timeout=COMMAND_TIMEOUT_S
        ).returncode
        == 0
    )


def _badness(state: str) -> int:
    return STATE_ORDER.index(state) if state in STATE_ORDER else len(STATE_ORDER)
