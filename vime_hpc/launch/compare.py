"""Two benchmark records against each other: what differs, and by how much each metric does.

A record is a run directory, a directory of run directories (repeats of one thing), or a JSON file as `vime-hpc bench
... --json` prints it. A metric of a run is the median over its steps, the first one left out (it warms up); with repeats
the median over the runs' medians.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime_hpc.config.paths import RunPaths
from vime_hpc.errors import ConfigError, DamagedDataError
from vime_hpc.launch.attempts import read_attempts
from vime_hpc.launch.record import MACHINE, NODES, SUBMITTED
from vime_hpc.observe.metrics import read_metrics

NOT_METRICS = {"step", "time", "attempt"}
# What no two runs share, and what says nothing about how they compare.
OWN = {"config.run.dir", "git.changes", "layout.run", "machine.host"}
OWN_PREFIXES = (
    "machine.slurm.SLURM_JOB_ID",
    "machine.slurm.SLURM_JOB_NODELIST",
    "machine.slurm.SLURM_RESTART_COUNT",
)


@dataclass(frozen=True)
class Metric:
    """A metric's values in one record: one per repeat, or per step of a single run."""

    values: tuple[float, ...]
    of: str
    """What a value is of: "step" or "repeat"."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """Least and greatest repeat; of steps the quartiles, so that one slow step does not hide a difference."""
        if self.of == "repeat" or len(self.values) < 4:
            return min(self.values), max(self.values)
        low, _, high = statistics.quantiles(self.values, n=4)
        return low, high


@dataclass
class BenchRecord:
    """One side of a comparison."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def compare(left: BenchRecord, right: BenchRecord) -> dict[str, Any]:
    """Differences of the facts by their dotted names, and of each metric in both: medians, ratio, spreads.

    `ratio` is right ÷ left, None where left is 0; `apart` says that the spreads do not overlap (one value has no
    spread, so it is never apart).
    """
    one, two = dict(_flat(left.facts)), dict(_flat(right.facts))
    differences = {
        name: [one.get(name), two.get(name)]
        for name in sorted(one.keys() | two.keys())
        if one.get(name) != two.get(name) and not _own(name)
    }
    both = [name for name in left.metrics if name in right.metrics]
    return {
        "a": left.name,
        "b": right.name,
        "differences": differences,
        "metrics": {name: _against(left.metrics[name], right.metrics[name]) for name in both},
        "only_in_one": sorted(left.metrics.keys() ^ right.metrics.keys()),
        "notes": [f"{side.name}: {note}" for side in (left, right) for note in side.notes],
    }


def _own(name: str) -> bool:
    of_node = name.startswith(f"{NODES}.") and name.endswith(".host")
    return name in OWN or of_node or name.startswith(OWN_PREFIXES)


def _against(one: Metric, two: Metric) -> dict[str, Any]:
    (low_1, high_1), (low_2, high_2) = one.spread, two.spread
    return {
        "a": one.median,
        "b": two.median,
        "ratio": two.median / one.median if one.median else None,
        "a_spread": [low_1, high_1],
        "b_spread": [low_2, high_2],
        "values": [len(one.values), len(two.values)],
        "apart": min(len(one.values), len(two.values)) > 1 and (high_1 < low_2 or high_2 < low_1),
    }


def _flat(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value


def read_bench_record(path: Path) -> BenchRecord:
    """A record from where it lies.

    Raises:
        ConfigError: there is nothing, or nothing that was measured.
        DamagedDataError: a file of it is not JSON.
    """
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        raise ConfigError(
            f"{path} does not exist; give a run directory or a file of `bench --json`"
        )
    if _is_run(path):
        return _of_run(path)
    runs = sorted(folder for folder in path.iterdir() if _is_run(folder))
    if not runs:
        raise ConfigError(
            f"{path} holds no record: neither metrics.jsonl of a run nor run directories with one"
        )
    return _of_repeats(path, [_of_run(run) for run in runs])


def _is_run(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file()


def _of_file(path: Path) -> BenchRecord:
    tree = _json(path)
    if not isinstance(tree, Mapping):
        raise DamagedDataError(f"{path} is no record: expected a JSON object of figures")
    record = BenchRecord(str(path))
    for name, value in _flat(tree):
        figures = value if isinstance(value, list) else [value]
        if not name.startswith("machine.") and figures and all(map(_is_number, figures)):
            record.metrics[name] = Metric(tuple(map(float, figures)), "repeat")
        else:
            record.facts[name] = value
    if not record.metrics:
        raise ConfigError(
            f"{path} holds no figures; expected the output of `vime-hpc bench --json`"
        )
    return record


def _of_run(run: Path) -> BenchRecord:
    record, paths = BenchRecord(str(run)), RunPaths(run)
    record.facts = _facts(paths, record.notes)
    steps = read_metrics(paths.metrics)
    for name in sorted({name for step in steps for name in step} - NOT_METRICS):
        values = [step[name] for step in steps[1:] or steps if _is_number(step.get(name))]
        if values:
            record.metrics[name] = Metric(tuple(values), "step")
    record.metrics |= _starts(paths, steps, record.facts)
    return record


def _facts(paths: RunPaths, notes: list[str]) -> dict[str, Any]:
    submitted = paths.record / SUBMITTED
    facts: dict[str, Any] = {}
    if submitted.exists():
        facts = _json(submitted)
    else:
        notes.append("no record/submitted.json, so git state and packages are not known")
        if paths.config.exists():
            facts = {"config": _json(paths.config)}
    machines = sorted(
        (paths.root / "attempts").glob(f"*/{MACHINE}"), key=lambda path: path.stat().st_mtime
    )
    if machines:
        facts["machine"] = _json(machines[-1])
        nodes = sorted((machines[-1].parent / NODES).glob("*.json"))
        facts[NODES] = {path.stem: _json(path) for path in nodes}
    else:
        notes.append(f"no attempts/*/{MACHINE}, so the machine is not known")
    return facts


def _starts(
    paths: RunPaths, steps: Sequence[Mapping[str, Any]], facts: dict[str, Any]
) -> dict[str, Metric]:
    """Seconds from the submission, and from the begin of each restart, to the first step that start finished."""
    first: dict[str, float] = {}
    for step in steps:
        first.setdefault(str(step.get("attempt")), step["time"])
    found: dict[str, tuple[float, ...]] = {}
    attempts = read_attempts(paths)
    submitted = facts.pop("time", None)
    if submitted and attempts and attempts[0].name in first:
        found["launch/submit_to_first_step_s"] = (first[attempts[0].name] - submitted,)
    again = tuple(first[a.name] - a.began for a in attempts[1:] if a.name in first)
    if again:
        found["launch/restart_to_first_step_s"] = again
    return {name: Metric(values, "repeat") for name, values in found.items()}


def _of_repeats(path: Path, runs: Sequence[BenchRecord]) -> BenchRecord:
    """Facts of the first; a fact in which repeats differ among themselves is noted."""
    record = BenchRecord(f"{path} ({len(runs)} repeats)", runs[0].facts)
    for run in runs[1:]:
        different = compare(runs[0], run)["differences"]
        different.pop("command", None)
        if different:
            record.notes.append(f"{run.name} is no plain repeat: {', '.join(different)} differ")
    for name in runs[0].metrics:
        values = tuple(run.metrics[name].median for run in runs if name in run.metrics)
        record.metrics[name] = Metric(values, "repeat")
    return record


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DamagedDataError(f"{path} is not JSON ({error}); was its writer killed?") from None
