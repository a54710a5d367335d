"""Which checkpoint a start would load: the newest complete one, and why the others are passed over. Without torch.

Only commit.json and the files it names count. A `latest` link or file, a directory's name or its time prove nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

_STEP = re.compile(r"step-(\d+)")
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """One checkpoint directory; problem is None where it can be loaded."""

    name: str
    step: int
    problem: str | None
    commit: dict[str, Any] | None = None


def examine(root: Path, *, digests: bool) -> list[CheckpointState]:
    """All checkpoint directories, newest first. Stops reading files at the first good one: older ones are not needed."""
    found: list[CheckpointState] = []
    folders = [
        (int(match[1]), path)
        for path in (root.iterdir() if root.is_dir() else [])
        if path.is_dir() and not path.is_symlink() and (match := _STEP.match(path.name))
    ]
    settled = False
    for step, folder in sorted(folders, reverse=True):
        state = _examine(step, folder, digests=digests and not settled)
        settled = settled or state.problem is None
        found.append(state)
    return found


def _examine(step: int, folder: Path, *, digests: bool) -> CheckpointState:
    if not _STEP.fullmatch(folder.name):
        return CheckpointState(
            folder.name, step, "incomplete: the writer was stopped before its rename"
        )
    try:
        commit = json.loads((folder / "commit.json").read_text())
        files, next_step = commit["files"], int(commit["next_step"])
    except FileNotFoundError:
        return CheckpointState(
            folder.name, step, "incomplete: no commit.json, the writer was stopped before the end"
        )
    except (ValueError, KeyError, TypeError) as error:
        return CheckpointState(folder.name, step, f"damaged: commit.json cannot be read ({error})")
    if next_step != step:
        return CheckpointState(
            folder.name, step, f"damaged: its commit says step {next_step}", commit
        )
    problems = (_problem(folder / entry["name"], entry, digests=digests) for entry in files)
    return CheckpointState(folder.name, step, next(filter(None, problems), None), commit)


def _problem(file: Path, entry: dict[str, Any], *, digests: bool) -> str | None:
    if not file.is_file():
        return f"damaged: {file.name} is missing"
    size = file.stat().st_size
    if size != entry["bytes"]:
        return f"damaged: {file.name} has {size} bytes, its commit says {entry['bytes']}"
    if digests and _digest(file) != entry["xxh3_128"]:
        return f"damaged: {file.name} does not have the digest of its commit"
    return None


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
