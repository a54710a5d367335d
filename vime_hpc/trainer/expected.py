"""Which tensors the trainer sends from which rank in which order, told from the model directory alone: no torch, no GPU.

What WeightExporter.tensor_specs says of the built model (a test holds the two against each other in every layout).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vime_hpc.config.parts import TrainerConfig
from vime_hpc.errors import ConfigError
from vime_hpc.weights.plan import TensorSpec

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_IN_LAYER = (
    "input_layernorm.weight",
    "self_attn.o_proj.weight",
    *(f"self_attn.{x}_proj.weight" for x in "qkv"),
    *(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "post_attention_layernorm.weight",
    "mlp.gate.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
"""Megatron-Core's order of the parameters of a layer; experts come last."""
_OUTSIDE = {"model.embed_tokens.weight": 0, "model.norm.weight": 1, "lm_head.weight": 2}


def expected_specs(
    shapes: Mapping[str, tuple[int, ...]], hf: Mapping[str, Any], trainer: TrainerConfig, dtype: str
) -> list[TensorSpec]:
    """Every tensor in the order in which it travels.

    Args:
        shapes: by Hugging Face name, of the model directory's files (without a tied head).
        hf: its config.json. dtype: model.dtype.
    Raises:
        ConfigError: a tensor that the trainer's families do not know.
    """
    order = {name: _place(name, hf, trainer) for name in shapes}
    return [
        TensorSpec(name, dtype, tuple(shapes[name]), _source(name, order[name][0], hf, trainer))
        for name in sorted(shapes, key=order.__getitem__)
    ]


def sender_names(num_sources: int, pp: int) -> list[str]:
    """Of every sender, which rank of the trainer it is: "stage 0", or "stage 0, expert rank 1" where each sends its experts."""
    ep = num_sources // pp
    return [
        f"stage {source // ep}" + (f", expert rank {source % ep}" if ep > 1 else "")
        for source in range(num_sources)
    ]


def _source(name: str, stage: int, hf: Mapping[str, Any], trainer: TrainerConfig) -> int:
    """The sender: the expert parallel rank that holds an expert, the first one of the stage for all else."""
    layer = _LAYER.fullmatch(name)
    expert = layer and _EXPERT.fullmatch(layer[2])
    return stage * trainer.ep + (_rank_and_place(expert, hf, trainer)[0] if expert else 0)


def _rank_and_place(
    expert: re.Match[str], hf: Mapping[str, Any], trainer: TrainerConfig
) -> tuple[int, int]:
    """(expert parallel rank that holds it, its number among that rank's) of an expert."""
    return divmod(int(expert[1]), _experts(hf) // trainer.ep)


def _place(name: str, hf: Mapping[str, Any], trainer: TrainerConfig) -> tuple[int, ...]:
    """(pipeline stage, place in the stage): a sorting key."""
    layers, last = int(hf["num_hidden_layers"]), trainer.pp - 1
    if name in _OUTSIDE:
        where = _OUTSIDE[name]
        return (0, -1) if where == 0 else (last, layers, where)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        raise _unknown(name)
    number = int(layer[1])
    stage = number // (layers // trainer.pp)
    if layer[2] in _IN_LAYER:
        return stage, number, _IN_LAYER.index(layer[2])
    expert = _EXPERT.fullmatch(layer[2])
    if expert is None:
        raise _unknown(name)
    # One local expert of every expert parallel rank at a time, first what goes in (gate, up), then what comes out.
    rank, local = _rank_and_place(expert, hf, trainer)
    kind = ("gate", "up", "down").index(expert[2])
    return stage, number, len(_IN_LAYER), local, kind // 2, rank, kind


def _experts(hf: Mapping[str, Any]) -> int:
    return int(hf.get("num_experts") or hf["num_local_experts"])


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"model.path: tensor {name} has no place in the trainer's models; is it a model of another architecture, or do "
        f"config.json and safetensors not belong together?"
    )
