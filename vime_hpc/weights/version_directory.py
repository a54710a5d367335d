"""A weight version on disk: RUN/weights/v000101, its manifest, and reading it. Needs numpy, no torch.

    v000101/
        full-JOB-s000-00000.safetensors      kind full: whole tensors, each sender its own files
        delta-JOB-s000.bin                   kind delta: changed elements over a named base version
        version.json                         written last: without it the version does not exist

A reader never changes anything: a delta is applied to a private copy of the base's tensor, so no base is ever half-applied.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vime_hpc.errors import CheckpointCorruptError, WeightsMismatchError
from vime_hpc.weights.delta import SAME, WHOLE, Bytes, apply
from vime_hpc.weights.digest import differing, root_digest, tensor_digest
from vime_hpc.weights.plan import DTYPE_BYTES, refuse_unless_complete, shown

MANIFEST = "version.json"
FORMAT = 1
FULL, DELTA = "full", "delta"
_FOLDER = re.compile(r"v(\d{6,})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # names from data never become paths


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a version: what it is, and where its bytes, or its changes, lie."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    """XXH3-128 of the whole tensor of this version."""
    encoding: str = WHOLE
    file: str = ""
    offset: int = 0
    nbytes: int = 0
    count: int = 0
    base_digest: str = ""
    """XXH3-128 of the base's tensor (kind delta)."""


@dataclass(frozen=True)
class Manifest:
    """What version.json says."""

    version: int
    kind: str
    root: str
    tensors: Mapping[str, Piece]
    files: Mapping[str, int]
    """Bytes by file name."""
    base_version: int | None = None
    base_root: str = ""

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    @property
    def digests(self) -> dict[str, str]:
        return {name: piece.digest for name, piece in self.tensors.items()}

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype and shape by name."""
        return {name: (piece.dtype, piece.shape) for name, piece in self.tensors.items()}

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))


def folder_of(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        CheckpointCorruptError: there is none, it cannot be read, or its root digest is not that of its tensors.
    """
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text())
        if raw.pop("format") != FORMAT:
            raise CheckpointCorruptError(f"{path}: not of format {FORMAT}")
        pieces = {
            name: Piece(**{**piece, "shape": tuple(piece["shape"])})
            for name, piece in raw.pop("tensors").items()
        }
        manifest = Manifest(tensors=pieces, **raw)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(
            f"{folder}: no {MANIFEST}; its writer has not finished or was stopped, so the version does not exist"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error
    names = {*manifest.files, *(p.file for p in pieces.values() if p.file)}
    if bad := sorted(n for n in names if not _FILE.fullmatch(n) or n not in manifest.files):
        raise CheckpointCorruptError(f"{path} names files it may not: {shown(bad)}")
    if (found := root_digest(manifest.digests)) != manifest.root:
        raise CheckpointCorruptError(
            f"{path}: root digest of its tensors is {found}, it says {manifest.root}"
        )
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointCorruptError: a file is missing or not of the length the manifest says; names it."""
    for name, size in manifest.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise CheckpointCorruptError(
                f"{path}: {'is missing' if found is None else f'{found} bytes'}, {MANIFEST} says {size} bytes"
            )


def versions_in(root: Path) -> dict[int, Path]:
    """Version directories by number, ascending, complete or not."""
    entries = root.iterdir() if root.is_dir() else iter(())
    found = {int(m[1]): p for p in entries if (m := _FOLDER.fullmatch(p.name)) and p.is_dir()}
    return dict(sorted(found.items()))


class VersionReader:
    """Tensors of one version: of a delta, those of its newest full base with every change applied.

    Files are mapped, so the ranks of a node share the pages the first of them read.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            CheckpointCorruptError: this version or one it builds on is incomplete.
            WeightsMismatchError: a base is not the one the delta was made over; names the tensors.
        """
        self.folder = folder
        self._chain = [(folder, read_manifest(folder))]
        check_sizes(*self._chain[0])
        while (newer := self._chain[-1][1]).kind == DELTA:
            assert newer.base_version is not None
            base = folder_of(folder.parent, newer.base_version)
            manifest = read_manifest(base)
            check_sizes(base, manifest)
            refuse_other_base(self._chain[-1][0], newer, base, manifest)
            self._chain.append((base, manifest))
        self._maps: dict[Path, Bytes] = {}

    @property
    def manifest(self) -> Manifest:
        return self._chain[0][1]

    @property
    def num_deltas(self) -> int:
        return len(self._chain) - 1

    def tensor(self, name: str, depth: int = 0) -> Bytes:
        """[nbytes] uint8, copy-on-write: of `name` in this version, or `depth` versions below it."""
        changes = []
        for folder, manifest in self._chain[depth:]:
            piece = manifest.tensors[name]
            if piece.encoding == WHOLE:
                data = self._payload(folder, piece)
                break
            if piece.encoding != SAME:
                changes.append((folder, piece))
        if not changes:
            return data
        data = np.array(data)
        for folder, piece in reversed(changes):
            payload = self._payload(folder, piece)
            try:
                apply(data, piece.encoding, piece.count, payload, DTYPE_BYTES[piece.dtype])
            except CheckpointCorruptError as error:
                raise CheckpointCorruptError(
                    f"{folder / piece.file}, tensor {name}: {error}"
                ) from error
        return data

    def check(self, name: str) -> None:
        """Raises CheckpointCorruptError: names the file and tensor, the digest found and the one expected."""
        newest = self.manifest.tensors[name]
        if tensor_digest(self.tensor(name), newest.dtype, newest.shape) == newest.digest:
            return
        for depth in range(
            self.num_deltas, -1, -1
        ):  # the oldest version that is wrong is the cause
            piece = self._chain[depth][1].tensors[name]
            found = tensor_digest(self.tensor(name, depth), piece.dtype, piece.shape)
            if found != piece.digest:
                raise CheckpointCorruptError(
                    f"{self._file_behind(name, depth)}, tensor {name}: found digest {found}, expected {piece.digest}; "
                    f"the bytes on disk are not the ones written"
                )

    def check_all(self) -> None:
        """Every tensor of the version. Raises as `check`."""
        for name in self.manifest.tensors:
            self.check(name)

    def _file_behind(self, name: str, depth: int) -> Path:
        for folder, manifest in self._chain[depth:]:
            if manifest.tensors[name].encoding != SAME:
                return folder / manifest.tensors[name].file
        return self.folder

    def _payload(self, folder: Path, piece: Piece) -> Bytes:
        if piece.nbytes == 0:
            return np.zeros(0, np.uint8)
        path = folder / piece.file
        if path not in self._maps:
            self._maps[path] = np.memmap(path, np.uint8, mode="c")
        payload: Bytes = self._maps[path][piece.offset : piece.offset + piece.nbytes]
        return payload


def refuse_other_base(delta: Path, newer: Manifest, base: Path, found: Manifest) -> None:
    """Raises WeightsMismatchError unless `found` is the base `newer` was made over."""
    refuse_unless_complete(newer.specs(), found.specs(), where=f"{delta}, changes over {base.name}")
    if found.root == newer.base_root:
        return
    expected = {name: piece.base_digest for name, piece in newer.tensors.items()}
    raise WeightsMismatchError(
        f"{delta} holds changes over version {newer.base_version} with root {newer.base_root}, but {base} has root "
        f"{found.root}: {shown(differing(expected, found.digests))} differ. Nothing was applied. It needs the "
        f"version it was made over; in a run, another attempt has probably rewritten the base"
    )


def prune(root: Path, newest: int, keep: int) -> list[int]:
    """Delete versions: those above `newest` (of an attempt that got further), and all but the `keep` newest and what they
    build on. Returns the numbers deleted.
    """
    folders = versions_in(root)
    needed: set[int] = set()
    for version in [v for v in folders if v <= newest and (folders[v] / MANIFEST).exists()][-keep:]:
        current: int | None = version
        while current is not None and current not in needed and current in folders:
            needed.add(current)
            current = read_manifest(folders[current]).base_version
    gone = [v for v in folders if v not in needed]
    for version in gone:
        (folders[version] / MANIFEST).unlink(missing_ok=True)  # first: a part of a version is none
        shutil.rmtree(folders[version])
    return gone


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
