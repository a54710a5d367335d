"""`vime-hpc resume-plan`: each number of the next start with the file it comes from; contradictions are refused."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from vime_hpc.buffer.index import committed_steps, next_uncommitted, read_commit
from vime_hpc.buffer.layout import Layout
from vime_hpc.cli.find_run import find_run
from vime_hpc.cli.submit_command import config_files
from vime_hpc.cluster.slurm_says import job_state
from vime_hpc.config.load import go_on_with, read_resolved
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import (
    CheckpointCorruptError,
    ConfigError,
    NothingToDoError,
    SlurmSilentError,
)
from vime_hpc.launch.checkpoints import CheckpointState, examine
from vime_hpc.launch.job import describe, job_spec
from vime_hpc.launch.run_directory import LIVE_STATES, read_owner


@dataclass
class Plan:
    """What the next start does. Every entry of `because` names the file a number comes from."""

    run: str
    num_steps: int
    next_step: int
    weight_version: int
    next_rollout_step: int
    data_cursor: list[dict[str, Any]]
    optimizer: str
    reusable_steps: list[int]
    trained_steps: int
    because: dict[str, str] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def resume_plan(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc resume-plan`."""
    paths = RunPaths(find_run(arguments.run).absolute())
    if not paths.config.exists():
        raise ConfigError(
            f"{paths.root} has not begun: it holds no config.json yet, so a start of it begins at step 0; "
            f"vime-hpc status {paths.root} says what it waits for"
        )
    config = go_on_with(
        read_resolved(paths.config), config_files([], arguments.cluster), arguments.overrides
    )
    plan = make_plan(paths, config, digests=not arguments.sizes_only)
    if arguments.cluster or paths.submitted.is_dir():
        plan.notes += [f"the job: {line}" for line in describe(job_spec(config))]
    print(json.dumps(asdict(plan)) if arguments.json else words(plan))
    if plan.next_step >= plan.num_steps and config.run.mode != "rollout_only":
        raise NothingToDoError(
            f"nothing to do: step {plan.next_step} of {plan.num_steps} is already trained; raise "
            f"--run.num_steps to go on"
        )
    return 0


def make_plan(paths: RunPaths, config: RunConfig, *, digests: bool = True) -> Plan:
    """Look at checkpoints and buffer and work out where the next start goes on.

    Raises:
        CheckpointCorruptError: there are checkpoints and none can be loaded, or checkpoint and buffer contradict each
            other.
        BufferCorruptError: a step's commit is damaged or missing in the middle.
    """
    states = examine(paths.checkpoints, digests=digests)
    chosen = next((state for state in states if state.problem is None), None)
    passed_over = [f"{state.name}: {state.problem}" for state in states if state.problem]
    if chosen is None and any(state.commit is not None for state in states):
        raise CheckpointCorruptError(
            f"{paths.checkpoints}: no checkpoint can be loaded ({'; '.join(passed_over)}). To start "
            f"again from the initial policy, move the directory away"
        )
    layout = Layout(paths.buffer)
    steps = committed_steps(layout)
    next_rollout = next_uncommitted(layout)
    next_step = chosen.step if chosen else 0
    version = int(chosen.commit.get("weight_version", next_step)) if chosen and chosen.commit else 0
    _refuse_contradictions(paths, config, chosen, version, next_rollout)
    commit = read_commit(layout, steps[-1]) if steps else None
    plan = Plan(
        str(paths.root),
        config.run.end_step,
        next_step,
        version,
        next_rollout,
        [worker["resume_state"] for worker in commit["workers"]] if commit else [],
        "restored" if chosen else "fresh",
        [step for step in steps if step >= next_step],
        sum(1 for step in steps if step < next_step),
        passed_over=passed_over,
    )
    _explain(plan, paths, chosen, steps)
    plan.notes += [*_layout_note(chosen, config), *_owner_note(paths)]
    return plan


def _refuse_contradictions(
    paths: RunPaths,
    config: RunConfig,
    chosen: CheckpointState | None,
    version: int,
    next_rollout: int,
) -> None:
    if chosen is None:
        return
    where = paths.checkpoints / chosen.name / "commit.json"
    if version != chosen.step:
        raise CheckpointCorruptError(
            f"{where}: next_step {chosen.step} but weight_version {version}; the two are saved "
            f"together, so the file was changed by hand. Remove {where.parent} to go on from an older one"
        )
    if chosen.step > next_rollout and config.run.mode != "rollout_only":
        raise CheckpointCorruptError(
            f"{where} has trained up to step {chosen.step}, but the buffer {paths.buffer} ends before step {next_rollout}: "
            f"steps that were trained on are gone, and the data cursor with them. Put the buffer back, or go on from an "
            f"older checkpoint by moving {where.parent} away"
        )


def _explain(plan: Plan, paths: RunPaths, chosen: CheckpointState | None, steps: list[int]) -> None:
    root = paths.root
    source = (
        (paths.checkpoints / chosen.name / "commit.json").relative_to(root)
        if chosen
        else "no checkpoint: initial policy"
    )
    last = (
        f"buffer/steps/{steps[-1]:06d}.json"
        if steps
        else "no committed step: beginning of the prompt set"
    )
    plan.because = {
        "next_step": str(source),
        "weight_version": str(source),
        "optimizer": str(source),
        "next_rollout_step": last,
        "data_cursor": last,
        "num_steps": "config.json and overrides",
    }


def _layout_note(chosen: CheckpointState | None, config: RunConfig) -> list[str]:
    saved = (chosen.commit or {}).get("layout", {}) if chosen else {}
    now = {"num_ranks": config.trainer.num_ranks, "tp": config.trainer.tp, "pp": config.trainer.pp}
    changed = [
        f"{name} {saved[name]} -> {value}"
        for name, value in now.items()
        if name in saved and saved[name] != value
    ]
    return [f"the checkpoint is resharded: {', '.join(changed)}"] if changed else []


def _owner_note(paths: RunPaths) -> list[str]:
    owner = read_owner(paths)
    if not owner:
        return []
    try:
        state = job_state(owner["job_id"]) if owner["job_id"].isdigit() else None
    except SlurmSilentError as error:
        return [str(error)]
    if state and state.state in LIVE_STATES:
        return [f"job {owner['job_id']} runs in this directory now; a second one would be refused"]
    return []


def words(plan: Plan) -> str:
    """The plan for a person."""
    what = (
        f"the next start trains from step {plan.next_step} on; the last of its {plan.num_steps} is step {plan.num_steps - 1}"
        if plan.next_step < plan.num_steps
        else f"all {plan.num_steps} steps are trained"
    )
    lines = [f"{plan.run}: {what}"]
    rows = [
        ("next step", plan.next_step, "next_step"),
        ("weight version", plan.weight_version, "weight_version"),
        ("optimizer", plan.optimizer, "optimizer"),
        ("next rollout step", plan.next_rollout_step, "next_rollout_step"),
    ]
    lines += [f"  {title:<18} {value!s:<10} {plan.because[key]}" for title, value, key in rows]
    for worker, cursor in enumerate(plan.data_cursor):
        shown = ", ".join(
            f"{key} {value}" for key, value in cursor.items() if not isinstance(value, (list, dict))
        )
        lines.append(
            f"  data cursor        worker {worker}: {shown} ({plan.because['data_cursor']})"
        )
    lines.append(
        f"  in the buffer      {plan.trained_steps} steps trained; generated, not trained, reusable: "
        f"{', '.join(map(str, plan.reusable_steps)) or 'none'}"
    )
    lines += [f"  passed over        {text}" for text in plan.passed_over]
    lines += [f"  note               {text}" for text in plan.notes]
    return "\n".join(lines)
