"""Tensors of a Hugging Face model directory, read one at a time by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from vime_hpc.errors import ConfigError

INDEX = "model.safetensors.index.json"


class HfTensors:
    """Which file holds which tensor, and the tensors themselves on demand (safetensors only: no
    pickles).
    """

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            ConfigError: no safetensors in the directory, or the index names a file that is not
                there.
        """
        self.directory = directory
        index = directory / INDEX
        if index.is_file():
            files = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        else:
            files = sorted(p.name for p in directory.glob("*.safetensors"))
        missing = [name for name in files if not (directory / name).is_file()]
        if missing or not files:
            raise ConfigError(
                f"model.path = {str(directory)!r}: expected model.safetensors or the files of {INDEX}, "
                + (
                    f"but {', '.join(missing)} is not there; the copy is incomplete"
                    if missing
                    else "found none; convert the model with save_pretrained(safe_serialization=True)"
                )
            )
        self._open: dict[str, Any] = {
            name: safe_open(directory / name, framework="pt") for name in files
        }
        self._file_of = {key: name for name, file in self._open.items() for key in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the type it is stored in.

        Raises:
            ConfigError: the model has no tensor of this name.
        """
        if name not in self._file_of:
            close = sorted(
                key
                for key in self._file_of
                if key.rsplit(".", 1)[0].endswith(name.rsplit(".", 2)[-2])
            )
            raise ConfigError(
                f"model.path = {str(self.directory)!r} has no tensor {name!r} ({len(self._file_of)} tensors"
                + (f"; similar: {', '.join(close[:3])}" if close else "")
                + "); config.json and the safetensors do not belong together"
            )
        return self._open[self._file_of[name]].get_tensor(name)  # type: ignore[no-any-return]
