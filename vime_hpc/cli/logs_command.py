"""`vime-hpc logs`: the ranks' log files of one start, merged by the time at the head of their lines."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from vime_hpc.cli.find_run import find_run
from vime_hpc.errors import ConfigError

STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


def logs(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc logs`."""
    directory = _attempt(find_run(arguments.target), arguments.attempt) / "logs"
    files = sorted(
        path
        for path in directory.glob("*.log")
        if not arguments.rank or path.stem in arguments.rank
    )
    if not files:
        raise ConfigError(
            f"no logs of {', '.join(arguments.rank or ['any rank'])} in {directory}; there are "
            f"{', '.join(sorted(path.stem for path in directory.glob('*.log'))) or 'none'}"
        )
    merged = merge(files)[-arguments.tail if arguments.tail else 0 :]
    for rank, line in merged:
        print(json.dumps({"rank": rank, "line": line}) if arguments.json else f"{rank:<10} {line}")
    return 0


def merge(files: list[Path]) -> list[tuple[str, str]]:
    """(rank, line) in order of time; a line without a time (traceback, C++ output) stays behind the one before it."""
    found = []
    for path in files:
        stamp = ""
        for number, line in enumerate(path.read_text(errors="replace").splitlines()):
            match = STAMP.match(line)
            stamp = match[0] if match else stamp
            found.append((stamp, path.stem, number, line))
    return [(rank, line) for _, rank, _, line in sorted(found)]


def _attempt(run: Path, name: str | None) -> Path:
    attempts = sorted((run / "attempts").glob("*.*"), key=lambda path: path.stat().st_mtime)
    if name:
        attempts = [path for path in attempts if path.name == name]
    if not attempts:
        there = ", ".join(sorted(path.name for path in (run / "attempts").glob("*.*")))
        raise ConfigError(
            f"{run} has no start {name}; there are {there}"
            if there and name
            else f"{run} has no logs yet: no start of it has begun; vime-hpc status {run} says why"
        )
    return attempts[-1]
