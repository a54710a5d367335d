"""Writing a weight version: every sender its own files, then the manifest, whose name makes the version exist.

Each file is written beside its name, flushed, renamed; the manifest comes last. Needs numpy, no torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vime_hpc.errors import VimeError, WeightsMismatchError
from vime_hpc.weights.delta import WHOLE, Bytes, Encoded
from vime_hpc.weights.digest import root_digest, tensor_digest
from vime_hpc.weights.plan import DTYPE_BYTES, Placed
from vime_hpc.weights.safetensors_index import build_header
from vime_hpc.weights.version_directory import (
    DELTA,
    FULL,
    MANIFEST,
    Manifest,
    Piece,
    sync_directory,
)

FILE_BYTES = 4 << 30


@dataclass
class Shard:
    """What one sender wrote of a version."""

    kind: str
    base_version: int | None = None
    pieces: dict[str, Piece] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Shard:
        raw = json.loads(text)
        pieces = {n: Piece(**{**p, "shape": tuple(p["shape"])}) for n, p in raw["pieces"].items()}
        return cls(raw["kind"], raw["base_version"], pieces, raw["files"])


class Files:
    """The file system as the writer uses it; tests pass one that is full."""

    def __init__(self, *, fsync: bool = True) -> None:
        self._fsync = fsync

    def write(self, descriptor: int, data: Bytes | bytes, offset: int) -> None:
        """All of `data` at a place of a file."""
        view = memoryview(data)  # type: ignore[arg-type]  # numpy arrays are buffers from Python 3.12 on for mypy
        while view:
            done = os.pwrite(descriptor, view, offset)
            view, offset = view[done:], offset + done

    @contextmanager
    def new(self, path: Path) -> Iterator[int]:
        """A descriptor of a file beside `path` that gets its name, durably, when the block ends well."""
        aside = path.with_name(f".{path.name}.tmp")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            yield descriptor
            if self._fsync:
                os.fsync(descriptor)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        os.replace(aside, path)
        if self._fsync:
            sync_directory(path.parent)


def write_full(
    files: Files, folder: Path, stem: str, placed: Sequence[Placed], tensors: Iterable[Bytes]
) -> Shard:
    """This sender's tensors as safetensors files of 4 GiB at most.

    Args:
        stem: begins the files' names; unlike any other sender's or attempt's.
        placed: name, type and shape of each tensor; tensors: their bytes, in the same order.
    """
    shard, stream = Shard(FULL), iter(tensors)
    for number, group in enumerate(_grouped(placed)):
        path = folder / f"{FULL}-{stem}-{number:05d}.safetensors"
        # Widest elements first, so that every tensor is aligned although the format allows no holes.
        order = sorted(group, key=lambda t: -DTYPE_BYTES[t.dtype])
        header = build_header({t.name: (t.dtype, t.shape, t.nbytes) for t in order})
        offsets, end = {}, len(header)
        for t in order:
            offsets[t.name] = end
            end += t.nbytes
        with files.new(path) as descriptor:
            files.write(descriptor, header, 0)
            for t in group:
                data = next(stream)
                files.write(descriptor, data, offsets[t.name])
                digest = tensor_digest(data, t.dtype, t.shape)
                shard.pieces[t.name] = Piece(
                    t.dtype, t.shape, digest, WHOLE, path.name, offsets[t.name], t.nbytes
                )
        shard.files[path.name] = end
    for _ in stream:  # whoever produces them sees its end, and may complain of a surplus
        pass
    return shard


def write_delta(
    files: Files,
    folder: Path,
    stem: str,
    base_version: int,
    changes: Iterable[tuple[Placed, str, str, Encoded]],
) -> Shard:
    """This sender's changes in one file.

    Args:
        changes: tensor, digest of its base, digest of the result, and what changed.
    """
    shard = Shard(DELTA, base_version)
    path, end = folder / f"{DELTA}-{stem}.bin", 0
    with files.new(path) as descriptor:
        for t, before, after, change in changes:
            files.write(descriptor, change.payload, end)
            size = len(change.payload)
            shard.pieces[t.name] = Piece(
                t.dtype, t.shape, after, change.encoding, path.name, end, size, change.count, before
            )
            end += size
    shard.files[path.name] = end
    return shard


def commit(
    files: Files, folder: Path, version: int, shards: Sequence[Shard], base_root: str = ""
) -> Manifest:
    """Write the manifest over what all senders wrote; sweep files of other attempts. Durable when this returns.

    Raises:
        WeightsMismatchError: senders disagree on the kind or base.
    """
    first = shards[0]
    if any((s.kind, s.base_version) != (first.kind, first.base_version) for s in shards):
        said = ", ".join(f"{s.kind} over {s.base_version}" for s in shards)
        raise WeightsMismatchError(f"version {version}: the senders wrote different things: {said}")
    pieces = {name: piece for shard in shards for name, piece in shard.pieces.items()}
    manifest = Manifest(
        version,
        first.kind,
        root_digest({name: piece.digest for name, piece in pieces.items()}),
        pieces,
        {name: size for shard in shards for name, size in shard.files.items()},
        first.base_version,
        base_root,
    )
    with files.new(folder / MANIFEST) as descriptor:
        files.write(descriptor, manifest.to_json().encode(), 0)
    for path in folder.iterdir():
        if path.name != MANIFEST and path.name not in manifest.files:
            path.unlink()
    return manifest


@contextmanager
def naming_the_disk(folder: Path, version: int) -> Iterator[None]:
    """An OSError of the block becomes a VimeError that says what was written where, and what room there is."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder if folder.is_dir() else folder.parent).free
        raise VimeError(
            f"{folder}: writing weights of version {version} failed: {error}; {free / 2**20:.0f} MiB are free there. "
            f"Nothing was published. Make room, or lower weights.keep_versions; vime-hpc weights ls "
            f"{folder.parent} lists what is kept"
        ) from error


def _grouped(placed: Sequence[Placed]) -> Iterator[list[Placed]]:
    group: list[Placed] = []
    for t in placed:
        if group and sum(g.nbytes for g in group) + t.nbytes > FILE_BYTES:
            yield group
            group = []
        group.append(t)
    if group:
        yield group


def specs_of(manifest: Manifest) -> list[Placed]:
    """The tensors of a version in its order, as the writers take them."""
    return [Placed(n, p.dtype, p.shape, 0) for n, p in manifest.tensors.items()]


def write_version(
    files: Files, folder: Path, version: int, tensors: Mapping[str, tuple[Placed, Bytes]]
) -> Manifest:
    """A whole version by one writer."""
    folder.mkdir(parents=True, exist_ok=True)
    placed = [t for t, _ in tensors.values()]
    shard = write_full(files, folder, "one-s000", placed, (data for _, data in tensors.values()))
    return commit(files, folder, version, [shard])
