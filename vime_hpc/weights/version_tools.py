"""Make one version directory from another: a delta applied to a named base, and a version as a Hugging Face directory."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vime_hpc.errors import CheckpointCorruptError, ConfigError
from vime_hpc.weights.delta import SAME, Bytes, apply
from vime_hpc.weights.digest import root_digest, tensor_digest
from vime_hpc.weights.plan import DTYPE_BYTES, Placed
from vime_hpc.weights.tensor_sets import INDEX, TensorSet, open_set
from vime_hpc.weights.version_directory import (
    DELTA,
    MANIFEST,
    Manifest,
    Piece,
    check_sizes,
    read_manifest,
    refuse_other_base,
    sync_directory,
)
from vime_hpc.weights.version_writer import Files, write_version

_NOT_MODEL = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf)(\.index\.json)?|\..*")


def apply_delta(base: Path, delta: Path, out: Path) -> Manifest:
    """Write `base` with the changes of `delta` as a full version directory; neither is changed.

    Args:
        base: version directory, or a Hugging Face directory of the same tensors; delta: version directory of kind delta.
    Raises:
        WeightsMismatchError: the base is not the one the delta was made over; names the tensors.
        CheckpointCorruptError: a file is damaged, or a result does not have its digest.
    """
    newer = read_manifest(delta)
    if newer.kind != DELTA:
        raise ConfigError(f"{delta} is a {newer.kind} version; there is nothing to apply")
    check_sizes(delta, newer)
    source = open_set(base)
    refuse_other_base(delta, newer, base, _manifest_of(source))
    with _aside(out) as folder:
        tensors = {
            name: (Placed(name, piece.dtype, piece.shape, 0), _changed(source, delta, newer, name))
            for name, piece in newer.tensors.items()
        }
        return write_version(Files(), folder, newer.version, tensors)


def export(version: Path, out: Path, model: Path) -> int:
    """Write a version as a Hugging Face directory; returns the number of tensors.

    Args:
        model: directory that config.json and the tokenizer's files are copied from.
    Raises:
        ConfigError: no config.json there, or `out` exists.
    """
    source = open_set(version)
    config_file = model / "config.json"
    if not config_file.is_file():
        raise ConfigError(f"{model}: no config.json; name the model's directory with --model")
    with _aside(out) as folder:
        tensors = {}
        for name, (dtype, shape) in source.specs().items():
            tensors[name] = (Placed(name, dtype, shape, 0), source.tensor(name))
        manifest = write_version(Files(), folder, _version_of(source), tensors)
        _refuse_damage(source, manifest)
        _as_model(folder, manifest)
        config = json.loads(config_file.read_text())
        config.pop("torch_dtype", None)
        types = {dtype for dtype, _ in source.specs().values()}
        _write_json(
            folder / "config.json", config | ({"dtype": types.pop()} if len(types) == 1 else {})
        )
        for file in model.iterdir():
            known = file.name in ("config.json", MANIFEST) or _NOT_MODEL.fullmatch(file.name)
            if file.is_file() and not known:
                shutil.copyfile(file, folder / file.name)
        return len(tensors)


def _changed(source: TensorSet, delta: Path, newer: Manifest, name: str) -> Bytes:
    piece, data = newer.tensors[name], source.tensor(name)
    if piece.encoding != SAME:
        data = np.array(data)
        with (delta / piece.file).open("rb") as file:
            file.seek(piece.offset)
            payload = np.frombuffer(file.read(piece.nbytes), np.uint8)
        apply(data, piece.encoding, piece.count, payload, DTYPE_BYTES[piece.dtype])
    found = tensor_digest(data, piece.dtype, piece.shape)
    if found != piece.digest:
        raise CheckpointCorruptError(
            f"{delta / piece.file}, tensor {name}: with the changes applied found digest {found}, expected "
            f"{piece.digest}; the changes are damaged"
        )
    return data


def _manifest_of(source: TensorSet) -> Manifest:
    """What the base holds, from its bytes."""
    pieces = {
        name: Piece(dtype, shape, tensor_digest(source.tensor(name), dtype, shape))
        for name, (dtype, shape) in source.specs().items()
    }
    root = root_digest({name: piece.digest for name, piece in pieces.items()})
    return Manifest(_version_of(source), "full", root, pieces, {})


def _version_of(source: TensorSet) -> int:
    path = source.path / MANIFEST
    return read_manifest(source.path).version if path.is_file() else 0


def _refuse_damage(source: TensorSet, written: Manifest) -> None:
    if not (source.path / MANIFEST).is_file():
        return
    expected = read_manifest(source.path).digests
    for name, digest in written.digests.items():
        if digest != expected[name]:
            raise CheckpointCorruptError(
                f"{source.path}, tensor {name}: found digest {digest}, expected {expected[name]}; nothing was exported. "
                f"vime-hpc weights verify {source.path} names the file"
            )


def _as_model(folder: Path, manifest: Manifest) -> None:
    """Names that transformers looks for; the manifest goes: it would name files that are renamed."""
    (folder / MANIFEST).unlink()
    names = sorted(manifest.files)
    new = {
        name: "model.safetensors"
        if len(names) == 1
        else f"model-{i:05d}-of-{len(names):05d}.safetensors"
        for i, name in enumerate(names, 1)
    }
    for old, name in new.items():
        (folder / old).rename(folder / name)
    if len(names) > 1:
        weight_map = {n: new[p.file] for n, p in sorted(manifest.tensors.items())}
        _write_json(
            folder / INDEX,
            {"metadata": {"total_size": manifest.nbytes}, "weight_map": weight_map},
        )


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A new directory beside `out` that gets its name when the block ends well, and goes when it does not."""
    if out.exists():
        raise ConfigError(f"{out} exists; name a directory that does not")
    folder = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        folder.rename(out)
        sync_directory(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
