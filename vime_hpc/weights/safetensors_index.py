"""Names, types and shapes of the tensors in a Hugging Face directory, read from safetensors headers alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_hpc.errors import CheckpointCorruptError, ConfigError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPE_NAMES: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip


def tensor_specs(model_dir: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape by name of every tensor an engine of this model must be sent.

    A tied `lm_head.weight` that a checkpoint stores all the same is left out.

    Raises:
        ConfigError: no safetensors file in the directory.
        CheckpointCorruptError: a file's header is unreadable.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{model_dir}: no *.safetensors file; model.path must be a Hugging Face directory"
        )
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                specs[name] = (
                    DTYPE_NAMES.get(entry["dtype"], entry["dtype"]),
                    tuple(entry["shape"]),
                )
    config = json.loads((model_dir / "config.json").read_text())
    if config.get("tie_word_embeddings", False):
        specs.pop("lm_head.weight", None)
    return specs


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of one safetensors file; its bytes lie at `start` … `start + nbytes` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Where every tensor of a file lies, in the file's order of bytes.

    Raises:
        CheckpointCorruptError: the header is unreadable, or the file is shorter than it says.
    """
    header = _header(file)
    with file.open("rb") as f:
        begin = 8 + int(struct.unpack("<Q", f.read(8))[0])
    found = {
        name: StoredTensor(
            DTYPE_NAMES.get(entry["dtype"], entry["dtype"]),
            tuple(entry["shape"]),
            begin + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
    end = max((t.start + t.nbytes for t in found.values()), default=begin)
    if (size := file.stat().st_size) != end:
        raise CheckpointCorruptError(
            f"{file}: {size} bytes, its header says {end}; the copy is probably not complete"
        )
    return dict(sorted(found.items(), key=lambda item: item[1].start))


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """The first bytes of a safetensors file, a multiple of 64, whose tensors follow one another in the order given.

    Args:
        tensors: dtype, shape and number of bytes by name.
    """
    codes = {name: code for code, name in DTYPE_NAMES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        offsets = [end, end := end + nbytes]
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return struct.pack("<Q", len(text)) + text


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as f:
        first = f.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES:
            raise CheckpointCorruptError(
                f"{file}: no safetensors header; the file is damaged or not complete"
            )
        try:
            header: dict[str, Any] = json.loads(f.read(length))
        except ValueError as error:
            raise CheckpointCorruptError(
                f"{file}: unreadable safetensors header: {error}"
            ) from error
    return header
