"""What the `vime-hpc weights` subcommands do. Each takes the parsed arguments and returns the exit code."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vime_hpc.config.paths import RunPaths
from vime_hpc.errors import ConfigError, VimeError
from vime_hpc.weights.readback import ask, wait_answer
from vime_hpc.weights.tensor_sets import differences, open_set, problems_of, versions_root
from vime_hpc.weights.version_directory import MANIFEST, check_sizes, read_manifest, versions_in
from vime_hpc.weights.version_tools import apply_delta, export as export_version

GOOD, FAILED, DAMAGED = 0, 1, 3


def ls(arguments: argparse.Namespace) -> int:
    """One line per version from its manifest alone."""
    path = Path(arguments.path)
    root = versions_root(path)
    folders = list(versions_in(root).values()) if root is not None else [path]
    if root is None:
        _refuse_run_without_versions(path)
        open_set(path)  # says what is wrong with a path that holds no weights
    rows = [_row(folder) for folder in folders]
    damaged = any(
        row["problem"] and (path_of / MANIFEST).exists()
        for row, path_of in zip(rows, folders, strict=True)
    )
    if arguments.json:
        print(json.dumps({"versions": rows}))
        return DAMAGED if damaged else GOOD
    print(f"{'version':>8} {'kind':<6} {'MiB':>10} {'tensors':>8} {'base':>8}  root")
    for row in rows:
        if row["problem"]:
            print(f"{row['name']:>8} UNUSABLE: {row['problem']}")
            continue
        base = "-" if row["base_version"] is None else row["base_version"]
        print(
            f"{row['version']:>8} {row['kind']:<6} {row['bytes'] / 2**20:10.2f} {row['tensors']:>8} {base:>8}  {row['root']}"
        )
    return DAMAGED if damaged else GOOD


def _refuse_run_without_versions(path: Path) -> None:
    """A run whose weights never lie in version directories is told by its transport, with what it has instead."""
    config = path / "config.json"
    try:
        transport = json.loads(config.read_text())["weights"]["transport"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no run directory; open_set says what it is not
    has = ", ".join(
        str(path / name) for name in ("export", "checkpoints") if (path / name).is_dir()
    )
    raise ConfigError(
        f'{path}: no version directories yet (weights.transport = "{transport}"'
        + (", which keeps none on disk" if transport in ("bridge", "ipc") else "")
        + f"); what it has of weights: {has or 'nothing'}"
    )


def verify(arguments: argparse.Namespace) -> int:
    """Exit code 3 when anything is damaged."""
    path = Path(arguments.path)
    if arguments.engines:
        return _verify_engines(path, arguments.wait, as_json=arguments.json)
    root = versions_root(path)
    if root is None:
        _refuse_run_without_versions(path)
    folders = list(versions_in(root).values()) if root is not None else [path]
    # In a run, what a stopped writer left is no version: nobody reads it, and the run sweeps it.
    unfinished = [str(f) for f in folders if root is not None and not (f / MANIFEST).exists()]
    found = {
        str(folder): problems_of(folder) for folder in folders if str(folder) not in unfinished
    }
    damaged = any(problems for _, problems in found.values())
    if arguments.json:
        rows = [{"path": p, "kind": kind, "problems": bad} for p, (kind, bad) in found.items()]
        print(json.dumps({"good": not damaged, "checked": rows, "unfinished": unfinished}))
        return DAMAGED if damaged else GOOD
    for name in unfinished:
        print(f"{name}: unfinished, not a version; its writer is at work or was stopped")
    for name, (kind, problems) in found.items():
        if not problems:
            print(f"{name}: {_said_good(Path(name), kind)}")
        for problem in problems:
            print(f"DAMAGED: {problem}")
    if damaged:
        print("A run writes a full version whenever it starts; damaged versions may be deleted.")
    return DAMAGED if damaged else GOOD


def _verify_engines(run: Path, timeout_s: float, *, as_json: bool) -> int:
    """Exit code 3 when an engine holds other bytes than were published, 1 when one could not be read back."""
    if not RunPaths(run).config.exists():
        raise ConfigError(
            f"{run} is no run directory (no config.json); --engines asks a running job"
        )
    if not as_json:
        print(f"asked; the job answers after its next publish (longest wait {timeout_s:g} s)")
    found = wait_answer(run, ask(run), timeout_s)
    ranks = found["ranks"]
    different = any(rank.get("different") for rank in ranks)
    unread = any("cannot" in rank for rank in ranks)
    if as_json:
        print(json.dumps({"good": not different and not unread, **found}))
    for rank in [] if as_json else ranks:
        print(f"version {found['version']}, {rank['engine']}, rank {rank['rank']}: {_said(rank)}")
    return DAMAGED if different else FAILED if unread else GOOD


def _said(rank: dict[str, Any]) -> str:
    if "cannot" in rank:
        return (
            f"not read back: {rank['cannot']}. The digests of what arrived were compared in the publish itself, and the "
            f"logprob probe speaks for what it computes with"
        )
    if rank["different"]:
        return f"DIFFERENT: {', '.join(rank['different'])} ({len(rank['different'])} of {rank['compared']} tensors)"
    return f"{rank['compared']} tensors, each bit for bit what was published"


def diff(arguments: argparse.Namespace) -> int:
    """Exit code 0 when both hold the same tensors bit for bit, 1 when not."""
    left, right = open_set(Path(arguments.left)), open_set(Path(arguments.right))
    found = list(differences(left, right))
    specs = left.specs()
    total = sum(len(left.tensor(name)) for name in specs)
    share = sum(d.changed_bytes for d in found) / total if total else 0.0
    largest = max((d.max_abs for d in found if d.max_abs is not None), default=None)
    if arguments.json:
        summary = {
            "equal": not found, "tensors": len(specs), "tensors_changed": len(found), "bytes": total,
            "share_of_bytes_changed": share, "max_abs": largest,
            "differences": [asdict(d) for d in found],
        }  # fmt: skip
        print(json.dumps(summary))
        return FAILED if found else GOOD
    for d in found[: arguments.limit]:
        if d.what != "bytes":
            print(f"{d.name}: {d.what}")
            continue
        size = "" if d.max_abs is None else f", max abs difference {d.max_abs:.4g}"
        print(
            f"{d.name}: {d.changed_bytes} of {d.nbytes} bytes ({d.changed_bytes / d.nbytes:.3%}){size}"
        )
    if len(found) > arguments.limit:
        print(f"… and {len(found) - arguments.limit} more tensors (--limit)")
    print(
        f"{len(found)} of {len(specs)} tensors differ, {share:.3%} of the bytes"
        + ("" if largest is None else f", max abs difference {largest:.4g}")
    )
    return FAILED if found else GOOD


def apply(arguments: argparse.Namespace) -> int:
    """Writes OUT; BASE and DELTA stay as they are."""
    manifest = apply_delta(Path(arguments.base), Path(arguments.delta), Path(arguments.out))
    result = {"out": arguments.out, "version": manifest.version, "root": manifest.root}
    _say(result, arguments, f"{arguments.out}: version {manifest.version}, root {manifest.root}")
    return GOOD


def export(arguments: argparse.Namespace) -> int:
    """Writes OUT, a directory that transformers and vLLM load."""
    version = Path(arguments.version)
    model = Path(arguments.model) if arguments.model else _model_of_run(version)
    count = export_version(version, Path(arguments.out), model)
    _say({"out": arguments.out, "tensors": count}, arguments, f"{arguments.out}: {count} tensors")
    return GOOD


def _row(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
    except VimeError as error:
        return {"name": folder.name, "problem": str(error)}
    return {
        "name": folder.name,
        "problem": None,
        "version": manifest.version,
        "kind": manifest.kind,
        "bytes": manifest.nbytes,
        "tensors": len(manifest.tensors),
        "base_version": manifest.base_version,
        "base_root": manifest.base_root,
        "root": manifest.root,
    }


def _said_good(folder: Path, kind: str) -> str:
    if kind == "version":
        manifest = read_manifest(folder)
        return f"good; {manifest.kind}, {len(manifest.tensors)} tensors, root {manifest.root}"
    if kind == "model":
        return (
            "whole; a Hugging Face directory carries no digests, so only its structure was checked"
        )
    return "good; every file has the digest of its commit"


def _model_of_run(version: Path) -> Path:
    config = version.resolve().parent.parent / "config.json"
    if not config.is_file():
        raise ConfigError(
            f"{version} is not in a run directory; say with --model where config.json and the tokenizer come from"
        )
    return Path(json.loads(config.read_text())["model"]["path"])


def _say(result: dict[str, Any], arguments: argparse.Namespace, text: str) -> None:
    print(json.dumps(result) if arguments.json else text)
