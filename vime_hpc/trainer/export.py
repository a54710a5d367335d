"""The policy's weights under their Hugging Face names: for the engines, and as a directory on disk."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors.torch import save_file
from torch import Tensor

from vime_hpc.errors import VimeError
from vime_hpc.trainer.families.base import Conversion, unshard
from vime_hpc.trainer.model import TrainedModel
from vime_hpc.trainer.source import INDEX

TensorSpec = tuple[str, str, tuple[int, ...], int]
"""(Hugging Face name, type as "float32" or "bfloat16", shape, index of the sender that holds it).
"""

SHARD_BYTES = 4 << 30
_NOT_TOKENIZER = re.compile(
    r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf)(\.index\.json)?|config\.json|\..*"
)


@dataclass(frozen=True)
class _Piece:
    """This rank's part of a parameter, and what it is a part of."""

    param: Tensor
    becomes: Sequence[Conversion]
    """What it is made from on every expert parallel rank in turn; of one that is no expert's, once."""
    group: dist.ProcessGroup | None
    """Ranks that hold the other parts; None where this one is the whole."""


class WeightExporter:
    """Yields whole tensors. Every expert parallel rank of a pipeline stage is a source of its own
    experts, the first one of all else, too. Made once; what it yields is always the present weights.

    No expert travels between trainer ranks. The parts of tensor parallel ranks still come together
    on the first rank of the stage; ranks beyond the first set of experts send nothing.
    """

    def __init__(self, model: TrainedModel) -> None:
        """Collective over the trainer ranks: they tell each other which tensors their stage holds."""
        self._model = model
        self._ranks = model.ranks
        self._first = self._first_of_stage()
        self._ep = mpu.get_expert_model_parallel_world_size()
        self._part = self._own_part()
        mine = list(self._stage_specs()) if self._part == 0 else []
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        self._specs = [spec for part in gathered for spec in part]

    def tensor_specs(self) -> list[TensorSpec]:
        """Every tensor of the model, stage by stage; the same list on every rank."""
        return list(self._specs)

    def sender_index(self) -> int | None:
        """This rank's source number (pipeline stage * ep + expert parallel rank) where it sends, else
        None.
        """
        return None if self._part is None else self._ranks.pp_rank * self._ep + self._part

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This sender's tensors in tensor_specs order; nothing on others, who must iterate it all the
        same.

        A tensor is valid until the next one is asked for (it may be the parameter itself): copy it
        to keep it. A rank that is asked for its next tensor has sent its parts of all tensors that
        stand before it in tensor_specs, and not yet of any behind it: the plan's order relies on it.
        """
        for piece in self._pieces():
            whole = self._whole(piece)
            if whole is None or self._part is None:
                continue
            own = piece.becomes[self._part]
            yield from zip(own.names, map(torch.Tensor.contiguous, own.split(whole)), strict=True)

    def save_hf(self, path: Path) -> None:
        """Write a Hugging Face directory: safetensors, config.json and the tokenizer files of the
        source. Collective.

        Written beside, flushed to disk, renamed: `path` is whole or not there. An older directory
            there is replaced.
        """
        aside = path.with_name(f".{path.name}.tmp-{os.environ.get('SLURM_JOB_ID', 'local')}")
        leads = dist.get_rank() == 0
        if leads:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        dist.barrier()
        files = self._write_shards(aside)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, files)
        if leads:
            self._write_rest(
                aside, {name: file for part in gathered for name, file in part.items()}
            )
            _replace(aside, path)
        dist.barrier()

    # --- which rank, which tensors -----------------------------------------------------------------

    def _first_of_stage(self) -> int:
        """Global rank of this stage's tensor and data rank 0."""
        per_stage = dist.get_world_size() // self._ranks.pp_size
        return self._ranks.pp_rank * per_stage

    def _own_part(self) -> int | None:
        """Which of the stage's senders this rank is: its expert parallel rank, in the first of the
        expert data parallel replicas; else None. 0 is the stage's first rank.
        """
        if mpu.get_expert_data_parallel_rank() != 0:
            return None
        part = int(mpu.get_expert_model_parallel_rank())
        assert (part == 0) == (dist.get_rank() == self._first)
        return part

    def _stage_specs(self) -> Iterator[TensorSpec]:
        dtype = str(self._model.config.params_dtype).removeprefix("torch.")
        first = self._ranks.pp_rank * self._ep
        for piece in self._pieces():
            shape = list(piece.param.shape)
            if piece.group is not None:
                dim = 1 if piece.becomes[0].cut == "columns" else 0
                shape[dim] *= dist.get_world_size(piece.group)
            for source, conversion in enumerate(piece.becomes, first):
                parts = conversion.split(torch.empty(shape, device="meta"))
                for name, part in zip(conversion.names, parts, strict=True):
                    yield name, dtype, tuple(part.shape), source

    def _pieces(self) -> Iterator[_Piece]:
        """Every parameter of this rank, in an order equal on all ranks of a stage."""
        model, tp = self._model, mpu.get_tensor_model_parallel_group()
        for name, param, conversion in model.parameters():
            if name == "output_layer.weight" and model.tied:
                continue  # with pipeline stages the last one holds a copy of the input embedding
            if ".experts." in name:
                yield _Piece(param, self._experts(name), None)
            else:
                cut = conversion.cut is not None and self._ranks.tp_size > 1
                yield _Piece(param, [conversion], tp if cut else None)

    def _experts(self, name: str) -> list[Conversion]:
        """The conversions of one local expert's parameter on each expert parallel rank in turn."""
        model = self._model
        per_rank = int(model.config.num_moe_experts or 1) // self._ep
        head, rest = name.split(".local_experts.")
        number, tail = rest.split(".", 1)
        local = int(number) % per_rank
        return [
            model.family.conversion(
                f"{head}.local_experts.{rank * per_rank + local}.{tail}",
                model.hf,
                model.padded_vocab,
            )
            for rank in range(self._ep)
        ]

    def _whole(self, piece: _Piece) -> Tensor | None:
        """The whole parameter where this rank sends it, else None."""
        sends = self._part is not None and self._part < len(piece.becomes)
        if piece.group is None:
            return piece.param.detach() if sends else None
        if self._first not in dist.get_process_group_ranks(piece.group):
            return None
        parts = (
            [torch.empty_like(piece.param) for _ in range(dist.get_world_size(piece.group))]
            if sends
            else None
        )
        dist.gather(piece.param.detach().contiguous(), parts, dst=self._first, group=piece.group)
        return None if parts is None else unshard(parts, piece.becomes[0].cut)

    # --- the directory -----------------------------------------------------------------------------

    def _write_shards(self, folder: Path) -> dict[str, str]:
        """This sender's files; returns the file of each tensor (empty on ranks that send nothing)."""
        experts = f"-experts{self._part:03d}" if self._part else ""
        stem = f"model-stage{self._ranks.pp_rank:03d}{experts}"
        files: dict[str, str] = {}
        shard: dict[str, Tensor] = {}
        filled = 0

        def flush() -> None:
            file = f"{stem}-{len(set(files.values())):05d}.safetensors"
            if shard:
                save_file(shard, folder / file, metadata={"format": "pt"})
                _fsync(folder / file)
                files.update(dict.fromkeys(shard, file))

        for name, tensor in self.tensors():
            shard[name] = tensor.cpu().clone()
            filled += tensor.nbytes
            if filled >= SHARD_BYTES:
                flush()
                shard, filled = {}, 0
        flush()
        return files

    def _write_rest(self, folder: Path, files: dict[str, str]) -> None:
        missing = [spec[0] for spec in self._specs if spec[0] not in files]
        if missing:
            raise VimeError(
                f"{folder}: {len(missing)} tensors were not written, the first is {missing[0]}"
            )
        if len(set(files.values())) == 1:
            (folder / next(iter(files.values()))).rename(folder / "model.safetensors")
        else:
            size = sum((folder / file).stat().st_size for file in set(files.values()))
            _write_json(
                folder / INDEX,
                {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))},
            )
        config = {key: value for key, value in self._model.hf.items() if key != "torch_dtype"}
        _write_json(
            folder / "config.json",
            config | {"dtype": str(self._model.config.params_dtype).removeprefix("torch.")},
        )
        for file in self._model.source.iterdir():
            if file.is_file() and not _NOT_TOKENIZER.fullmatch(file.name):
                shutil.copyfile(file, folder / file.name)
                _fsync(folder / file.name)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _fsync(path)


def _replace(aside: Path, path: Path) -> None:
    _fsync(aside)
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        aside.rename(path)
        shutil.rmtree(old)
    else:
        aside.rename(path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
