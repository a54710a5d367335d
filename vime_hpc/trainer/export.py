"""The policy's weights under their Hugging Face names: for the engines, and as a directory on disk."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
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


class WeightExporter:
    """Yields whole tensors, one pipeline stage a source. Made once; what it yields is always the
    present weights.
    """

    def __init__(self, model: TrainedModel) -> None:
        """Collective over the trainer ranks: they tell each other which tensors their stage holds."""
        self._model = model
        self._ranks = model.ranks
        self._sender = self._stage_sender()
        mine = list(self._stage_specs()) if self._is_sender else []
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        self._specs = sorted((spec for part in gathered for spec in part), key=lambda spec: spec[3])

    def tensor_specs(self) -> list[TensorSpec]:
        """Every tensor of the model, stage by stage; the same list on every rank."""
        return list(self._specs)

    def sender_index(self) -> int | None:
        """This rank's source number (= its pipeline stage) where it sends, else None."""
        return self._ranks.pp_rank if self._is_sender else None

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The stage's tensors in tensor_specs order on the sender; nothing on others, who must
        iterate it all the same.

        A tensor is valid until the next one is asked for (it may be the parameter itself): copy it
        to keep it.
        """
        for conversion, pieces, group in self._pieces():
            gathered = self._gather(pieces, group)
            if gathered is None:
                continue
            if len(conversion) > 1:  # experts: every expert parallel rank holds other ones, whole
                for one, tensor in zip(conversion, gathered, strict=True):
                    yield from zip(
                        one.names, map(torch.Tensor.contiguous, one.split(tensor)), strict=True
                    )
            else:
                full = unshard(gathered, conversion[0].cut)
                yield from zip(
                    conversion[0].names,
                    map(torch.Tensor.contiguous, conversion[0].split(full)),
                    strict=True,
                )

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

    @property
    def _is_sender(self) -> bool:
        return dist.get_rank() == self._sender

    def _stage_sender(self) -> int:
        """Global rank of this stage's sender: tensor and data rank 0."""
        per_stage = dist.get_world_size() // self._ranks.pp_size
        return self._ranks.pp_rank * per_stage

    def _stage_specs(self) -> Iterator[TensorSpec]:
        dtype = str(self._model.config.params_dtype).removeprefix("torch.")
        for conversions, param, group in self._pieces():
            shape = list(param.shape)
            size = 1 if len(conversions) > 1 or group is None else dist.get_world_size(group)
            if conversions[0].cut is not None:
                shape[1 if conversions[0].cut == "columns" else 0] *= size
            for conversion in conversions:
                parts = conversion.split(torch.empty(shape, device="meta"))
                for name, part in zip(conversion.names, parts, strict=True):
                    yield name, dtype, tuple(part.shape), self._ranks.pp_rank

    def _pieces(self) -> Iterator[tuple[list[Conversion], Tensor, dist.ProcessGroup | None]]:
        """(what it becomes, this rank's part, the group that holds the others or None) of every
        parameter.
        """
        model = self._model
        ep = mpu.get_expert_model_parallel_world_size()
        for name, param, conversion in model.parameters():
            if name == "output_layer.weight" and model.tied:
                continue  # with pipeline stages the last one holds a copy of the input embedding
            if ".experts." in name:
                yield (
                    self._experts(name, ep),
                    param,
                    mpu.get_expert_model_parallel_group() if ep > 1 else None,
                )
            else:
                group = mpu.get_tensor_model_parallel_group()
                yield (
                    [conversion],
                    param,
                    group if conversion.cut is not None and self._ranks.tp_size > 1 else None,
                )

    def _experts(self, name: str, ep: int) -> list[Conversion]:
        """The conversions of one local expert's parameter on each expert parallel rank in turn."""
        model = self._model
        per_rank = int(model.config.num_moe_experts or 1) // ep
        head, rest = name.split(".local_experts.")
        number, tail = rest.split(".", 1)
        local = int(number) % per_rank
        return [
            model.family.conversion(
                f"{head}.local_experts.{rank * per_rank + local}.{tail}",
                model.hf,
                model.padded_vocab,
            )
            for rank in range(ep)
        ]

    def _gather(self, piece: Tensor, group: dist.ProcessGroup | None) -> list[Tensor] | None:
        """All ranks' parts in rank order on the sender, None elsewhere."""
        if group is None:
            return [piece.detach()] if self._is_sender else None
        if self._sender not in dist.get_process_group_ranks(group):
            return None
        parts = (
            [torch.empty_like(piece) for _ in range(dist.get_world_size(group))]
            if self._is_sender
            else None
        )
        dist.gather(piece.detach().contiguous(), parts, dst=self._sender, group=group)
        return parts

    # --- the directory -----------------------------------------------------------------------------

    def _write_shards(self, folder: Path) -> dict[str, str]:
        """This stage's files; returns the file of each tensor (empty on ranks that send nothing)."""
        files: dict[str, str] = {}
        shard: dict[str, Tensor] = {}
        filled = 0

        def flush() -> None:
            file = (
                f"model-stage{self._ranks.pp_rank:03d}-{len(set(files.values())):05d}.safetensors"
            )
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
