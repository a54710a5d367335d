"""What a model family is to the trainer: how its config.json reads, and how its Hugging Face
tensors become Megatron's.

A family answers two questions and holds no state: `transformer_kwargs` (config.json -> megatron
    TransformerConfig) and
`conversion` (one Megatron parameter, by its name in the whole model -> which Hugging Face tensors
make it, and how). Names are those of megatron-core's local layer spec, with the global layer and
expert numbers: `decoder.layers.17.self_attention.linear_qkv.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from vime_hpc.errors import ConfigError

Cut = Literal["rows", "columns", "gate_up"] | None
"""How tensor parallel ranks share a parameter: dim 0, dim 1, each half of dim 0, or everyone holds
all of it.
"""


class Conversion(Protocol):
    """One Megatron parameter and the Hugging Face tensors it is made from; join and split are exact
    inverses.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def cut(self) -> Cut: ...

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole Megatron tensor from the tensors called `names`."""
        ...

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        """The tensors called `names` from the whole Megatron tensor."""
        ...


class ModelFamily(Protocol):
    """All a family file has to offer."""

    def transformer_kwargs(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of megatron's TransformerConfig that config.json decides."""
        ...

    def gpt_kwargs(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of megatron's GPTModel that config.json decides (rotary embedding)."""
        ...

    def conversion(self, name: str, hf: Mapping[str, Any], padded_vocab: int) -> Conversion:
        """How the Megatron parameter `name` is made; padded_vocab: rows of Megatron's embedding and
        output weights.
        """
        ...


@dataclass(frozen=True)
class Whole:
    """The same tensor under another name."""

    names: tuple[str, ...]
    cut: Cut = None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        return (full,)


@dataclass(frozen=True)
class Vocabulary:
    """[vocab, hidden], filled up with zero rows so that tensor parallel ranks hold equal shares."""

    names: tuple[str, ...]
    vocab_size: int
    padded_size: int
    cut: Cut = "rows"

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        missing = self.padded_size - parts[0].shape[0]
        return (
            torch.cat([parts[0], parts[0].new_zeros(missing, parts[0].shape[1])])
            if missing
            else parts[0]
        )

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        return (full[: self.vocab_size],)


@dataclass(frozen=True)
class GateUp:
    """[2F, H]: gate over up. A tensor parallel rank holds its share of the gate over its share of
    up.
    """

    names: tuple[str, ...]
    cut: Cut = "gate_up"

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        return full.chunk(2, 0)


@dataclass(frozen=True)
class QueryKeyValue:
    """[(heads + 2 groups) * head_dim, H]: for each query group its query heads, its key head, its
    value head.
    """

    names: tuple[str, ...]
    num_heads: int
    num_groups: int
    head_dim: int
    cut: Cut = "rows"

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        rest = parts[0].shape[1:]
        grouped = [part.reshape(self.num_groups, -1, *rest) for part in parts]
        return torch.cat(grouped, 1).reshape(-1, *rest)

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        rest = full.shape[1:]
        queries = self.num_heads // self.num_groups * self.head_dim
        grouped = full.reshape(self.num_groups, queries + 2 * self.head_dim, *rest)
        parts = torch.split(grouped, [queries, self.head_dim, self.head_dim], 1)
        return tuple(part.reshape(-1, *rest) for part in parts)


def shard(full: Tensor, cut: Cut, rank: int, size: int) -> Tensor:
    """This tensor parallel rank's part of a whole Megatron tensor."""
    if cut is None or size == 1:
        return full
    if cut == "gate_up":
        return torch.cat([half.chunk(size, 0)[rank] for half in full.chunk(2, 0)])
    return full.chunk(size, 0 if cut == "rows" else 1)[rank]


def unshard(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """The whole Megatron tensor from the parts of all tensor parallel ranks, in rank order."""
    if cut is None or len(parts) == 1:
        return parts[0]
    if cut == "gate_up":
        halves = [part.chunk(2, 0) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(parts), 0 if cut == "rows" else 1)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Smallest multiple of tp that holds the vocabulary; the added columns are cut off before every
    softmax.
    """
    return -(-vocab_size // tp) * tp


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc[12])\.weight")


@dataclass(frozen=True)
class DecoderFamily:
    """Decoder-only models named as Llama named them: Llama, Qwen2.5, Qwen3 and their MoE forms
    differ by few flags.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    moe: bool = False

    def transformer_kwargs(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        _refuse_unsupported(hf)
        heads = int(hf["num_attention_heads"])
        kwargs: dict[str, Any] = {
            "num_layers": int(hf["num_hidden_layers"]),
            "hidden_size": int(hf["hidden_size"]),
            "ffn_hidden_size": int(hf["intermediate_size"]),
            "num_attention_heads": heads,
            "num_query_groups": int(hf.get("num_key_value_heads") or heads),
            "kv_channels": head_dim(hf),
            "layernorm_epsilon": float(hf["rms_norm_eps"]),
            "normalization": "RMSNorm",
            "qk_layernorm": self.qk_norm,
            "add_qkv_bias": self.qkv_bias or bool(hf.get("attention_bias")),
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "hidden_dropout": 0.0,
            "attention_dropout": float(hf.get("attention_dropout") or 0.0),
        }
        if self.moe:
            kwargs |= {
                "num_moe_experts": int(hf.get("num_experts") or hf["num_local_experts"]),
                "moe_router_topk": int(hf["num_experts_per_tok"]),
                "moe_ffn_hidden_size": int(hf["moe_intermediate_size"]),
                "moe_router_load_balancing_type": "none",
                "moe_router_dtype": "fp32",
                "moe_router_pre_softmax": False,  # softmax over the chosen ones = norm_topk_prob
            }
        return kwargs

    def gpt_kwargs(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        rope = rope_parameters(hf)
        kwargs: dict[str, Any] = {
            "position_embedding_type": "rope",
            "rotary_base": rope["rope_theta"],
            "rotary_percent": float(rope.get("partial_rotary_factor", 1.0)),
        }
        if rope["rope_type"] == "llama3":
            kwargs |= {"rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
        return kwargs

    def conversion(self, name: str, hf: Mapping[str, Any], padded_vocab: int) -> Conversion:
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tied_or_input = name.startswith("embedding") or hf.get("tie_word_embeddings", False)
            return Vocabulary(
                ("model.embed_tokens.weight" if tied_or_input else "lm_head.weight",),
                int(hf["vocab_size"]),
                padded_vocab,
            )
        if name == "decoder.final_layernorm.weight":
            return Whole(("model.norm.weight",))
        layer = _LAYER.fullmatch(name)
        if layer is None:
            raise ConfigError(
                f"Megatron parameter {name!r} has no Hugging Face name in this family; the model was "
                "built with options its family file does not know"
            )
        return self._layer_conversion(f"model.layers.{layer[1]}.", layer[2], hf)

    def _layer_conversion(self, prefix: str, rest: str, hf: Mapping[str, Any]) -> Conversion:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        if rest.startswith("self_attention.linear_qkv."):
            kind = rest.rsplit(".", 1)[1]
            heads = int(hf["num_attention_heads"])
            return QueryKeyValue(
                tuple(f"{attention}{x}_proj.{kind}" for x in "qkv"),
                heads,
                int(hf.get("num_key_value_heads") or heads),
                head_dim(hf),
            )
        fixed: dict[str, Conversion] = {
            "input_layernorm.weight": Whole((prefix + "input_layernorm.weight",)),
            "pre_mlp_layernorm.weight": Whole((prefix + "post_attention_layernorm.weight",)),
            "self_attention.linear_proj.weight": Whole((attention + "o_proj.weight",), "columns"),
            "self_attention.q_layernorm.weight": Whole((attention + "q_norm.weight",)),
            "self_attention.k_layernorm.weight": Whole((attention + "k_norm.weight",)),
            "mlp.linear_fc1.weight": GateUp((mlp + "gate_proj.weight", mlp + "up_proj.weight")),
            "mlp.linear_fc2.weight": Whole((mlp + "down_proj.weight",), "columns"),
            "mlp.router.weight": Whole((mlp + "gate.weight",)),
        }
        if rest in fixed:
            return fixed[rest]
        expert = _EXPERT.fullmatch(rest)
        if expert is None:
            raise ConfigError(
                f"Megatron parameter {prefix}{rest} has no Hugging Face name in this family"
            )
        base = f"{mlp}experts.{expert[1]}."
        if expert[2] == "fc1":
            return GateUp((base + "gate_proj.weight", base + "up_proj.weight"))
        return Whole((base + "down_proj.weight",), "columns")


def head_dim(hf: Mapping[str, Any]) -> int:
    """Channels of one attention head."""
    return int(hf.get("head_dim") or int(hf["hidden_size"]) // int(hf["num_attention_heads"]))


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embedding settings; transformers 5 writes one table, transformers 4 `rope_theta` and
    `rope_scaling`.
    """
    table = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    table.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    table["rope_type"] = table.get("rope_type") or table.get("type") or "default"
    if table["rope_type"] not in ("default", "llama3"):
        raise ConfigError(
            f"model.path: config.json asks for rope_type {table['rope_type']!r}; the trainer knows "
            "'default' and 'llama3'"
        )
    fixed = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if table["rope_type"] == "llama3":
        for key, value in fixed.items():  # constants inside megatron-core's rotary embedding
            if table.get(key, value) != value:
                raise ConfigError(
                    f"model.path: rope_parameters.{key} = {table[key]}, Megatron-Core computes {value}"
                )
    return table


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    wrong = {
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(hf.get("use_sliding_window")),
        "mlp_bias": bool(hf.get("mlp_bias")),
        "decoder_sparse_step": int(hf.get("decoder_sparse_step") or 1) != 1,
        "mlp_only_layers": bool(hf.get("mlp_only_layers")),
        "norm_topk_prob": bool(hf.get("num_experts") or hf.get("num_local_experts"))
        and not hf.get("norm_topk_prob", False),
    }
    for key, bad in wrong.items():
        if bad:
            raise ConfigError(
                f"model.path: config.json has {key} = {hf.get(key)!r}, which the trainer does not compute"
            )
