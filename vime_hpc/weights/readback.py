"""Asking a running job to read its engines' weights back: a file in the run directory, answered after the next publish.

    RUN/readback/ID.wanted.json     written by `vime-hpc weights verify RUN --engines`
    RUN/readback/ID.answer.json     written by the leading rollout worker, which takes the other one away

Needs no network between the two, so it works from a login node. Needs no torch.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from vime_hpc.errors import DeadlineError

FOLDER = "readback"
_WANTED, _ANSWER = ".wanted.json", ".answer.json"
POLL_S = 0.2


def ask(run: Path) -> str:
    """Leave a request in a run directory; returns its id."""
    folder = run / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    number = secrets.token_hex(8)
    _write(folder / f"{number}{_WANTED}", {"time": time.time()})
    return number


def wait_answer(run: Path, number: str, timeout_s: float) -> dict[str, Any]:
    """What the job answered. Raises DeadlineError; the request is then taken back."""
    path, end = run / FOLDER / f"{number}{_ANSWER}", time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > end:
            (run / FOLDER / f"{number}{_WANTED}").unlink(missing_ok=True)
            raise DeadlineError(
                f"{run}: engines were not read back within {timeout_s:g} s; it happens after the next publish of a running "
                f"job. Is it running? vime-hpc status {run}; steps that take longer: --wait SECONDS"
            )
        time.sleep(POLL_S)
    answer: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return answer


def wanted(run: Path) -> list[str]:
    """Ids of the requests that are still to be answered."""
    return sorted(p.name.removesuffix(_WANTED) for p in (run / FOLDER).glob(f"*{_WANTED}"))


def answer(run: Path, number: str, found: dict[str, Any]) -> None:
    """Answer a request; afterwards it is no longer wanted."""
    _write(run / FOLDER / f"{number}{_ANSWER}", found)
    (run / FOLDER / f"{number}{_WANTED}").unlink(missing_ok=True)


def _write(path: Path, value: dict[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(value))
    os.replace(aside, path)
