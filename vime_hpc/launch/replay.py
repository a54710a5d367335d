"""A replay: a step range of a run's buffer through the trainer again, in a run directory of its own. Needs no torch.

The source run is only read: its buffer stays where it is, the checkpoint it starts from is linked into the new directory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_hpc.buffer.index import committed_steps
from vime_hpc.buffer.layout import find_buffer
from vime_hpc.config.load import build_config, parse_override, read_resolved
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import CheckpointCorruptError, ConfigError
from vime_hpc.launch.checkpoints import CheckpointState, examine
from vime_hpc.launch.run_directory import make_root
from vime_hpc.observe.metrics import read_metrics

COMPARED = "train/"
"""Metrics with this prefix are the trainer's own; the others are times, or come from the buffer."""
SECTIONS = frozenset(
    {"algorithm", "optimizer", "trainer", "checkpoint", "observe", "cluster", "model"}
)
OPTIONS = frozenset({"rollout.filters", "run.wait_timeout_s", "run.startup_timeout_s"})


@dataclass(frozen=True)
class Replay:
    """Steps first..last - 1 of `source`, trained again in `config.run.dir`."""

    source: RunPaths
    config: RunConfig
    first: int
    last: int
    changed: tuple[str, ...]
    """The overrides that change something."""

    @property
    def out(self) -> Path:
        return Path(self.config.run.dir)


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric of one step. None = not recorded (or not finite: JSON has no NaN)."""

    step: int
    metric: str
    recorded: float | None
    replayed: float | None
    equal: bool | None
    """Bit for bit; None where the source run has no record of the step."""


def plan_replay(
    run: Path, steps: str | None, overrides: Iterable[str], out: Path | None = None
) -> Replay:
    """Check everything that can be checked before a process starts; writes nothing.

    Args:
        run: the source run directory.
        steps: "A:B", A <= step < B; either may be left out.
        overrides: --section.option=value.
        out: the new run directory; none = RUN-replay-N beside the source, the first N that is free.
    Raises:
        ConfigError: no such steps or no checkpoint at A (the nearest are named), an option that a replay cannot change,
            or an `out` inside the source run.
        CheckpointCorruptError: the checkpoint at A is damaged.
    """
    source = RunPaths(run.absolute())
    old = read_resolved(source.config)
    home = RunPaths(Path(old.run.train_from)) if old.run.train_from else source
    first, last = _range(find_buffer(home.root).root, steps)
    if first:
        _need_checkpoint(source, first)
    tree = old.model_dump(mode="json")
    target = (out or _free_directory(source.root)).absolute()
    if target.resolve().is_relative_to(source.root.resolve()):
        raise ConfigError(
            f"--out {target} lies in {source.root}, the run that is only read; name another directory"
        )
    before = json.dumps(tree, sort_keys=True)
    changed = tuple(text for text in overrides if _apply(tree, text))
    if json.dumps(tree, sort_keys=True) == before:
        changed = ()
    _refuse_impossible(old, tree, first)
    tree["run"] |= {
        "dir": str(target),
        "mode": "train_only",
        "train_from": str(home.root),
        "until": last,
        "num_steps": max(old.run.num_steps, last),
    }
    tree["checkpoint"] |= {"interval": 0, "export_hf": False}
    return Replay(source, build_config(tree), first, last, changed)


def prepare(replay: Replay) -> None:
    """Make the new run directory, with the checkpoint of the first step in it.

    Raises:
        ConfigError: something else lies there.
    """
    paths = RunPaths(replay.out)
    if paths.config.exists():
        old = read_resolved(paths.config).run
        if old.train_from != replay.config.run.train_from:
            raise ConfigError(
                f"--out {paths.root} holds another run; a replay needs a directory of its own"
            )
    make_root(paths.root, replay.config.run.share_with_group)
    if replay.first == 0:
        return
    name = f"step-{replay.first:06d}"
    final, aside = paths.checkpoints / name, paths.checkpoints / f"{name}.tmp"
    if final.exists():
        return
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(replay.source.checkpoints / name, aside, copy_function=_link_or_copy)
    aside.rename(final)


def compare(replay: Replay) -> list[Compared]:
    """The trainer's metrics of every replayed step beside those the source run recorded."""
    recorded = {line["step"]: line for line in read_metrics(replay.source.metrics)}
    replayed = {line["step"]: line for line in read_metrics(RunPaths(replay.out).metrics)}
    found: list[Compared] = []
    for step in range(replay.first, replay.last):
        old, new = recorded.get(step), replayed.get(step, {})
        names = sorted({n for n in {**(old or {}), **new} if n.startswith(COMPARED)})
        found += [_compared(step, name, old, new) for name in names]
    return found


def _compared(
    step: int, name: str, old: Mapping[str, Any] | None, new: Mapping[str, Any]
) -> Compared:
    if old is None or not any(key.startswith(COMPARED) for key in old):
        return Compared(step, name, None, new.get(name), None)
    same = (name in old) == (name in new) and _bits(old.get(name)) == _bits(new.get(name))
    return Compared(step, name, old.get(name), new.get(name), same)


def _bits(value: float | None) -> str | None:
    """Also tells 0.0 from -0.0."""
    return None if value is None or not math.isfinite(value) else float(value).hex()


def _range(buffer: Path, steps: str | None) -> tuple[int, int]:
    there = committed_steps(find_buffer(buffer))
    if not there:
        raise ConfigError(f"{buffer} has no committed step; there is nothing to replay")
    low, colon, high = (steps or ":").partition(":")
    try:
        first = int(low) if low else there[0]
        last = int(high) if high else there[-1] + 1
    except ValueError:
        colon = ""
        first = last = 0
    if not colon or not 0 <= first < last:
        raise ConfigError(
            f"--steps {steps}: expected A:B with 0 <= A < B, which replays the steps A to B - 1"
        )
    missing = sorted(set(range(first, last)) - set(there))
    if missing:
        raise ConfigError(
            f"--steps {first}:{last}: {buffer} holds the steps {there[0]} to {there[-1]}, not {missing[0]}"
            + (f" to {missing[-1]}" if len(missing) > 1 else "")
        )
    return first, last


def _need_checkpoint(source: RunPaths, first: int) -> None:
    states = examine(source.checkpoints, digests=False)
    here = [state for state in states if state.step == first and state.name == f"step-{first:06d}"]
    if here and here[0].problem:
        raise CheckpointCorruptError(
            f"{source.checkpoints / here[0].name}: {here[0].problem}; {_nearest(states, first)}"
        )
    if not here:
        raise ConfigError(
            f"--steps {first}: no checkpoint stands at step {first} in {source.checkpoints}; "
            f"{_nearest(states, first)}. A run keeps those of checkpoint.interval and checkpoint.keep"
        )


def _nearest(states: list[CheckpointState], first: int) -> str:
    good = sorted(state.step for state in states if state.problem is None and state.step != first)
    below = max((step for step in good if step < first), default=0)
    above = min((step for step in good if step > first), default=None)
    before = f"step {below}" if below else "step 0, the initial model"
    after = f", the nearest above is step {above}" if above is not None else ""
    return f"the nearest below is {before}{after}; start there: --steps {below}:"


def _apply(tree: dict[str, Any], text: str) -> bool:
    """Set the override in the tree; returns whether it differs from what was there."""
    keys, value = parse_override(text)
    name = ".".join(keys)
    if keys[0] not in SECTIONS and name not in OPTIONS:
        raise ConfigError(
            f"{text}: a replay trains on samples that are there, so this cannot be changed. What can: "
            f"{', '.join(sorted(SECTIONS))}, {', '.join(sorted(OPTIONS))}; the directory by --out, the steps by --steps"
        )
    at = tree
    for key in keys[:-1]:
        at = at.setdefault(key, {})
    differs = bool(at.get(keys[-1]) != value)
    at[keys[-1]] = value
    return differs


def _refuse_impossible(old: RunConfig, tree: Mapping[str, Any], first: int) -> None:
    gone = [name for name in old.rollout.filters if name not in tree["rollout"]["filters"]]
    if gone:
        raise ConfigError(
            f"rollout.filters without {', '.join(gone)}: the groups it dropped are not in the buffer, so a replay can add "
            f"filters and take none away"
        )
    wants_reference = bool(tree["algorithm"]["kl_loss_coef"])
    if first and wants_reference and not old.algorithm.kl_loss_coef:
        raise ConfigError(
            f"algorithm.kl_loss_coef: the checkpoint at step {first} has no reference model, the run had none; replay from "
            f"the initial model: --steps 0:"
        )


def _free_directory(source: Path) -> Path:
    number = 1
    while (found := source.with_name(f"{source.name}-replay-{number}")).exists():
        number += 1
    return found


def _link_or_copy(source: str, target: str) -> None:
    """Files of a checkpoint never change, so a hard link is as good as a copy, where there can be one."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
