"""Failure records: what ended a process, written by the process itself, since exit codes get lost on the way up."""

from __future__ import annotations

import json
import socket
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime_hpc.errors import VimeError

LAST_LINES = 20
_TAIL_BYTES = 1 << 14
_LOOPS = ("trainer_loop", "rollout_loop")


def write_failure(
    directory: Path, name: str, error: BaseException, *, last_lines: Sequence[str] = ()
) -> None:
    """RUN/attempts/<attempt>/failures/<rank>.json: rank, host, phase, exception, traceback, exit code, last log lines."""
    directory.mkdir(parents=True, exist_ok=True)
    record = {
        "rank": name,
        "host": socket.gethostname(),
        "time": time.time(),
        "phase": phase_of(error),
        "error": type(error).__name__,
        "message": str(error),
        "exit_code": error.exit_code if isinstance(error, VimeError) else 1,
        "consequence": isinstance(error, VimeError) and error.consequence,
        "traceback": "".join(traceback.format_exception(error)),
        "last_lines": list(last_lines),
    }
    part = directory / f".{name}.part"
    part.write_text(json.dumps(record, indent=1))
    part.rename(directory / f"{name}.json")


def phase_of(error: BaseException) -> str:
    """What the process was doing: "step 3, append" inside a loop, else the role's function it was in.

    Read off the traceback, so that no role has to say at every line where it is.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for index, frame in enumerate(frames):
        if frame.f_code.co_name in _LOOPS:
            step = frame.f_locals.get("step")
            where = "before the first step" if step is None else f"step {step}"
            inside = frames[index + 1 : index + 2]
            return f"{where}, {inside[0].f_code.co_name}" if inside else where
    ours = [frame for frame in frames if "/vime_hpc/roles/" in frame.f_code.co_filename]
    return (ours or frames)[-1].f_code.co_name if frames else ""


def tail(path: Path, count: int = LAST_LINES) -> list[str]:
    """The last lines of a log; empty where there is none. Reads the end only: logs grow to gigabytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]


def first_failure(directory: Path) -> dict[str, Any] | None:
    """The earliest record that is a cause, not the consequence of another process's end."""
    records: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in directory.glob("*.json")
    ]
    return min(records, key=lambda r: (r["consequence"], r["time"]), default=None)
