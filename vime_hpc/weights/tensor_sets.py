"""Weights on disk as one kind of thing: a version directory, a Hugging Face directory or a checkpoint. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from vime_hpc.errors import CheckpointCorruptError, ConfigError, VimeError
from vime_hpc.weights.delta import Bytes
from vime_hpc.weights.plan import shown
from vime_hpc.weights.safetensors_index import StoredTensor, stored_tensors
from vime_hpc.weights.version_directory import MANIFEST, VersionReader, versions_in

INDEX = "model.safetensors.index.json"
COMMIT = "commit.json"
_CHUNK = 8 << 20


class TensorSet(Protocol):
    """Named tensors of a directory."""

    path: Path
    kind: str

    def specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """dtype and shape by name."""
        ...

    def tensor(self, name: str) -> Bytes:
        """[nbytes] uint8."""
        ...

    def problems(self) -> Iterator[str]:
        """What is damaged, one message a file or tensor."""
        ...


class VersionSet:
    """A directory with version.json."""

    kind = "version"

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, VersionReader(path)

    def specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return self.reader.manifest.specs()

    def tensor(self, name: str) -> Bytes:
        return self.reader.tensor(name)

    def problems(self) -> Iterator[str]:
        manifest = self.reader.manifest
        for file in (f for f in manifest.files if f.endswith(".safetensors")):
            yield from self._of_header(file)
        for name in manifest.tensors:
            try:
                self.reader.check(name)
            except CheckpointCorruptError as error:
                yield str(error)

    def _of_header(self, file: str) -> Iterator[str]:
        try:
            stored = stored_tensors(self.path / file)
        except CheckpointCorruptError as error:
            yield str(error)
            return
        said = {
            n: StoredTensor(p.dtype, p.shape, p.offset, p.nbytes)
            for n, p in self.reader.manifest.tensors.items()
            if p.file == file
        }
        wrong = sorted(n for n in said.keys() | stored.keys() if said.get(n) != stored.get(n))
        if wrong:
            yield f"{self.path / file}: its header does not say of {shown(wrong)} what {MANIFEST} says"


class SafetensorsSet:
    """A directory of safetensors files: a Hugging Face model, or a checkpoint of this project (commit.json)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = "checkpoint" if (path / COMMIT).is_file() else "model"
        self._where: dict[str, tuple[Path, StoredTensor]] = {}
        self._maps: dict[Path, Bytes] = {}
        self._broken: list[str] = []
        for file in sorted(path.glob("*.safetensors")):
            try:
                entries = stored_tensors(file)
            except CheckpointCorruptError as error:
                self._broken.append(str(error))
                continue
            self._where.update({name: (file, entry) for name, entry in entries.items()})

    def specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        if self._broken:
            raise CheckpointCorruptError("; ".join(self._broken))
        return {name: (entry.dtype, entry.shape) for name, (_, entry) in self._where.items()}

    def tensor(self, name: str) -> Bytes:
        file, entry = self._where[name]
        if not entry.nbytes:
            return np.zeros(0, np.uint8)
        if file not in self._maps:
            self._maps[file] = np.memmap(file, np.uint8, mode="c")
        data: Bytes = self._maps[file][entry.start : entry.start + entry.nbytes]
        return data

    def problems(self) -> Iterator[str]:
        yield from self._broken
        yield from self._of_commit() if self.kind == "checkpoint" else self._of_index()

    def _of_index(self) -> Iterator[str]:
        index = self.path / INDEX
        if not index.is_file():
            return
        named: dict[str, str] = json.loads(index.read_text())["weight_map"]
        for name in sorted(named.keys() - self._where.keys()):
            yield f"{self.path / named[name]}, tensor {name}: {INDEX} names it, the file does not hold it"
        for name in sorted(self._where.keys() - named.keys()):
            yield f"{self._where[name][0]}, tensor {name}: {INDEX} does not name it"

    def _of_commit(self) -> Iterator[str]:
        for entry in json.loads((self.path / COMMIT).read_text())["files"]:
            file = self.path / entry["name"]
            if not file.is_file():
                yield f"{file} is missing"
            elif (found := _digest(file)) != entry["xxh3_128"]:
                damaged = ", ".join(n for n, (f, _) in self._where.items() if f == file)
                yield (
                    f"{file}: found digest {found}, expected {entry['xxh3_128']}; damaged is one of: "
                    f"{shown(damaged.split(', ')) if damaged else 'no tensor, another record'}"
                )


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How one tensor differs. `max_abs`: of floats of the same type and shape; None where that cannot be said."""

    name: str
    what: str
    changed_bytes: int
    nbytes: int
    max_abs: float | None


def differences(left: TensorSet, right: TensorSet) -> Iterator[TensorDifference]:
    """Every tensor that is not bit for bit the same in both, in name order."""
    ours, theirs = left.specs(), right.specs()
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            side = right.path if name not in theirs else left.path
            yield TensorDifference(name, f"not in {side}", 0, 0, None)
            continue
        a, b = left.tensor(name), right.tensor(name)
        if ours[name] != theirs[name]:
            what = f"{_spec(ours[name])} against {_spec(theirs[name])}"
            yield TensorDifference(name, what, max(len(a), len(b)), len(a), None)
            continue
        changed = int(np.count_nonzero(a != b))
        if changed:
            yield TensorDifference(name, "bytes", changed, len(a), max_abs(a, b, ours[name][0]))


def max_abs(a: Bytes, b: Bytes, dtype: str) -> float | None:
    """Largest absolute difference of two tensors of a floating type, NaN if one has any; None for other types."""
    left, right = as_floats(a, dtype), as_floats(b, dtype)
    if left is None or right is None:
        return None
    with np.errstate(invalid="ignore"):
        return float(np.max(np.abs(left - right), initial=0.0))


def as_floats(data: Bytes, dtype: str) -> NDArray[Any] | None:
    """[elements] float32 or float64 of a tensor's bytes; None for types that are no floats."""
    if dtype == "bfloat16":
        wide: NDArray[Any] = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return wide
    if dtype in ("float64", "float32", "float16"):
        floats: NDArray[Any] = data.view(dtype)
        return floats.astype(np.float32) if dtype == "float16" else floats
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (data.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "float8_e4m3fn":
        sign = np.where(data & 0x80, -1.0, 1.0).astype(np.float32)
        exponent, fraction = (data >> 3) & 0xF, (data & 7).astype(np.float32)
        normal = (1 + fraction / 8) * np.exp2(exponent.astype(np.float32) - 7)
        value = np.where(exponent == 0, fraction / 8 * 2.0**-6, normal)
        decoded: NDArray[Any] = sign * np.where((data & 0x7F) == 0x7F, np.float32(np.nan), value)
        return decoded
    return None


def open_set(path: Path) -> TensorSet:
    """
    Raises:
        ConfigError: there are no weights in the directory.
        VimeError: a version that is incomplete or has another base.
    """
    if (path / MANIFEST).is_file():
        return VersionSet(path)
    if path.is_dir() and any(path.glob("*.safetensors")):
        return SafetensorsSet(path)
    if (
        path.is_dir()
        and path.parent.name == "weights"
        and path in versions_in(path.parent).values()
    ):
        raise CheckpointCorruptError(f"{path}: no {MANIFEST}; its writer did not finish")
    raise ConfigError(
        f"{path}: no weights here; expected a version directory (RUN/weights/v000003), a Hugging Face directory or a "
        f"checkpoint (RUN/checkpoints/step-000003)"
    )


def versions_root(path: Path) -> Path | None:
    """RUN/weights of a run directory or of itself; None where the path holds weights itself, or no versions."""
    for root in (path / "weights", path):
        if versions_in(root):
            return root
    return None


def problems_of(path: Path) -> tuple[str, list[str]]:
    """The kind of weights in a directory, and everything wrong with them."""
    try:
        found = open_set(path)
        return found.kind, list(found.problems())
    except ConfigError:
        raise
    except VimeError as error:
        return "version", [str(error)]


def _spec(spec: tuple[str, tuple[int, ...]]) -> str:
    return f"{spec[0]} {list(spec[1])}"


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return str(digest.hexdigest())
