"""Failure records: what ended a process, written by the process itself, since exit codes get lost on the way up."""

from __future__ import annotations

import json
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from vime_hpc.errors import VimeError


def write_failure(directory: Path, name: str, error: BaseException) -> None:
    """RUN/attempts/<attempt>/failures/<rank>.json: rank, host, exception, traceback, exit code."""
    directory.mkdir(parents=True, exist_ok=True)
    record = {
        "rank": name,
        "host": socket.gethostname(),
        "time": time.time(),
        "error": type(error).__name__,
        "message": str(error),
        "exit_code": error.exit_code if isinstance(error, VimeError) else 1,
        "consequence": isinstance(error, VimeError) and error.consequence,
        "traceback": "".join(traceback.format_exception(error)),
    }
    part = directory / f".{name}.part"
    part.write_text(json.dumps(record, indent=1))
    part.rename(directory / f"{name}.json")


def first_failure(directory: Path) -> dict[str, Any] | None:
    """The earliest record that is a cause, not the consequence of another process's end."""
    records: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in directory.glob("*.json")
    ]
    return min(records, key=lambda r: (r["consequence"], r["time"]), default=None)
