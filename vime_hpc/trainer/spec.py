"""Megatron-Core layers without TransformerEngine or apex, handed over through its ModuleSpec: no
patch.

One file serves megatron-core 0.16.1 and 0.19.2, CPU and GPU. Each class says which stock class it
stands for and why.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor

from vime_hpc.trainer.rotary import PackedRotary, positions_of


class Norm(torch.nn.RMSNorm):
    """For WrappedTorchNorm, which asserts against sequence parallelism."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device())
        # finalize_model_grads sums the gradients of so marked weights over the tensor parallel
        # ranks
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """For DotProductAttention, which asserts against packed sequences: causal attention within each
    packed sample.

    CPU: one scaled_dot_product_attention per sample. CUDA: torch's varlen kernel (FlashAttention)
        over all of them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.grouped = config.num_attention_heads != config.num_query_groups
        self.varlen = getattr(config, "vime_hpc_attention", "sdpa") == "varlen"
        self.rotary: PackedRotary | None = getattr(config, "vime_hpc_rotary", None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """[tokens, heads, dim] packed, or [seq, batch, heads, dim]; returns the heads side by side
        in the last dim.
        """
        if self.rotary is not None:
            positions = _positions(query, packed_seq_params)
            query, key = (self._turned(x, positions) for x in (query, key))
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._sdpa(q, k, v).permute(2, 0, 1, 3).flatten(2)
        if self.varlen:
            return self._varlen(query, key, value, packed_seq_params).flatten(1)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        # split, not slices: each slice's backward writes a gradient as long as the whole pack
        # (64 samples of 80 tokens: 193 -> 37 ms)
        samples = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
        outputs = [self._sdpa(*(x.transpose(0, 1)[None] for x in qkv))[0] for qkv in samples]
        return torch.cat([output.transpose(0, 1) for output in outputs]).flatten(1)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        assert self.rotary is not None
        return self.rotary(x.flatten(0, -3), positions).view(x.shape)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.grouped
        )

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: Any) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        known = _varlen_parameters()
        kwargs: dict[str, Any] = {}
        if "is_causal" in known:  # torch 2.10
            kwargs["is_causal"] = True
        else:  # 2.11 and later: look back without bound, not ahead
            kwargs["window_size"] = (-1, 0)
        if self.grouped and "enable_gqa" in known:  # 2.12
            kwargs["enable_gqa"] = True
        # 2.11 has no such argument, and its kernel takes fewer key/value heads all the same
        if self.scale is not None:
            kwargs["scale"] = self.scale
        bounds, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        result: Any = varlen_attn(
            query, key.contiguous(), value.contiguous(), bounds, bounds, longest, longest, **kwargs
        )
        assert isinstance(result, Tensor)
        return result


def _positions(query: Tensor, packed: Any) -> Tensor:
    if packed is not None:
        return positions_of(packed, query.shape[0])
    return torch.arange(query.shape[0], device=query.device).repeat_interleave(query.shape[1])


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


class Replay(RouterReplay):  # type: ignore[misc]
    """For RouterReplay's process-wide switch, which under full recompute with PP > 1 replays the
    wrong microbatch.

    One first-in-first-out queue per layer; a recomputation inside backward is recognised and served
    again from `redo`.
    Measured with the stock class, PP2 and full recompute: right loss, gradients off by a factor
        (2.65), no message.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mode: str | None = None
        """None, "record" or "replay"."""
        self.todo: list[Tensor] = []
        self.redo: list[Tensor] = []
        self.seen: list[Tensor] = []

    def start(self, mode: str | None, todo: Sequence[Tensor] = ()) -> None:
        """Before a pass: "record" into `seen`, "replay" one of `todo` a microbatch, or None.

        Forgets what the pass before left: one without a backward pass leaves its `redo` behind.
        """
        self.mode, self.todo, self.redo, self.seen = mode, list(todo), [], []

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        again = is_checkpointing() and torch.is_grad_enabled()  # the second run, inside backward
        if self.mode != "replay":
            probs, chosen = default_compute_topk(
                scores, topk, num_groups=num_groups, group_topk=group_topk
            )
            if self.mode == "record" and not again:
                self.seen.append(chosen)
            return probs, chosen
        chosen = self.redo.pop(0) if again else self.todo.pop(0)
        if is_checkpointing() and not again:
            self.redo.append(chosen)
        chosen = chosen.to(scores.device, torch.int64)
        assert chosen.shape == (scores.shape[0], topk), (chosen.shape, scores.shape, topk)
        return scores.gather(1, chosen), chosen


class Router(TopKRouter):  # type: ignore[misc]
    """TopKRouter with the replay above, and a gating that needs no TransformerEngine.

    megatron-core 0.16.1 calls te_general_gemm, undefined without it (also on a GPU; fixed in
    0.17.0).
    """

    router_replay: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.router_replay is not None:
            RouterReplay.global_router_replay_instances.remove(self.router_replay)
            self.router_replay = Replay()

    def gating(self, input: Tensor) -> Tensor:
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(
            self.config.moe_router_dtype, input.dtype
        )
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)


class HostSplits(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """The all-to-all dispatcher on a CPU: stock, its split sizes stay tensors and all_to_all_single
    refuses them.
    """

    num_out_tokens: Any

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point and not self.drop_and_pad:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                if torch.is_tensor(getattr(self, name)):
                    setattr(self, name, getattr(self, name).numpy())
            if torch.is_tensor(self.num_out_tokens):
                self.num_out_tokens = int(self.num_out_tokens)
        return tokens_per_expert


class Moe(MoELayer):  # type: ignore[misc]
    """MoELayer with the dispatcher above where there is no CUDA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if (
            not torch.cuda.is_available()
            and type(self.token_dispatcher) is MoEAlltoAllTokenDispatcher
        ):
            self.token_dispatcher.__class__ = HostSplits


def layer_spec(config: TransformerConfig) -> Any:
    """The spec of one transformer layer for this configuration."""
    moe = config.num_moe_experts is not None
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = spec.submodules
    attention = parts.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention.core_attention = CoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if moe and isinstance(parts.mlp, ModuleSpec):  # 0.16
        parts.mlp.module, parts.mlp.submodules.router = Moe, Router
    elif moe:  # 0.17 and later hand over a functools.partial
        submodules = parts.mlp.keywords["submodules"]
        submodules.router = Router
        parts.mlp = functools.partial(Moe, submodules=submodules)
    return spec


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The spec of this pipeline stage's layers and of the final norm."""
    layers = [layer_spec(config)] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def _device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
