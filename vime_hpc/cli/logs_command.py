"""`vime-hpc logs`: the ranks' log files of one start, merged by the time at the head of their lines."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

from vime_hpc.cli.find_run import find_run
from vime_hpc.cli.printable import printable
from vime_hpc.errors import ConfigError
from vime_hpc.observe.failure import tail

UNSTAMPED = 500
"""Lines of a traceback or the like that may stand between the last lines wanted and the time they belong to."""
STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
VLLM_STAMP = re.compile(r"(?:\(\w+ pid=\d+\) )?[A-Z]+ (\d\d)(-\d\d \d\d:\d\d:\d\d) \[")
"""vLLM's servers write month and day alone: `(EngineCore pid=7) INFO 11-30 08:26:15 [core.py:1] ...`"""


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
    merged = merge(files, last=arguments.tail)
    for rank, line in merged:
        print(
            json.dumps({"rank": rank, "line": line})
            if arguments.json
            else f"{rank:<10} {printable(line)}"
        )
    return 0


def merge(files: list[Path], last: int = 0) -> list[tuple[str, str]]:
    """(rank, line) in order of time; a line without a time (traceback, C++ output) stays behind the one before it.

    Args:
        last: only so many lines; then only the ends of the files are read (0: everything).
    """
    found = []
    for path in files:
        stamp = ""
        written = time.localtime(path.stat().st_mtime)
        lines = (
            tail(path, last + UNSTAMPED) if last else path.read_text(errors="replace").splitlines()
        )
        for number, line in enumerate(lines):
            stamp = _stamp(line, written) or stamp
            found.append((stamp, path.stem, number, line))
    return [(rank, line) for _, rank, _, line in sorted(found)[-last:]]


def _stamp(line: str, written: time.struct_time) -> str | None:
    """The time at the head of a line, in our own form; `written` (the file's last change) knows the year."""
    if match := STAMP.match(line):
        return match[0]
    if match := VLLM_STAMP.match(line):
        year = written.tm_year - (int(match[1]) > written.tm_mon)
        return f"{year}-{match[1]}{match[2]},000"
    return None


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
    # A start that found nothing to do, or the directory taken, wrote none.
    return next((path for path in reversed(attempts) if any(path.glob("logs/*"))), attempts[-1])
