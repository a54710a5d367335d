"""Models to publish of which only sizes matter: config.json and safetensors headers over a hole of a file, tensors at random."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from trainer_step import COMMON, DIMS as DENSE, HEAD_DIM, VOCABULARY, sizes

from vime_hpc.rollout.tiny_policy import byte_tokenizer
from vime_hpc.weights.safetensors_index import build_header

DIMS = (*DENSE, "30b-a3b")
MOE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def config_of(dims: str) -> dict[str, Any]:
    """config.json of a Qwen3 or Qwen3-MoE model, head untied."""
    moe = dims not in DENSE
    return {
        **COMMON,
        **(MOE if moe else sizes(dims)),
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if moe else "qwen3",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 1e6,
    }


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape by Hugging Face name, layer by layer."""
    h, heads, kv = (
        config[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    q, k = heads * HEAD_DIM, kv * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, h)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (h,),
            at + "self_attn.q_proj.weight": (q, h),
            at + "self_attn.k_proj.weight": (k, h),
            at + "self_attn.v_proj.weight": (k, h),
            at + "self_attn.q_norm.weight": (HEAD_DIM,),
            at + "self_attn.k_norm.weight": (HEAD_DIM,),
            at + "self_attn.o_proj.weight": (h, q),
            at + "post_attention_layernorm.weight": (h,),
        }
        if "num_experts" not in config:
            shapes |= _mlp(at + "mlp.", h, config["intermediate_size"])
            continue
        shapes[at + "mlp.gate.weight"] = (config["num_experts"], h)
        for expert in range(config["num_experts"]):
            shapes |= _mlp(f"{at}mlp.experts.{expert}.", h, config["moe_intermediate_size"])
    return shapes | {"model.norm.weight": (h,), "lm_head.weight": (VOCABULARY, h)}


def _mlp(at: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        at + "gate_proj.weight": (inner, hidden),
        at + "up_proj.weight": (inner, hidden),
        at + "down_proj.weight": (hidden, inner),
    }


def write_headers(folder: Path, dims: str) -> Path:
    """A Hugging Face directory whose safetensors file has all names and shapes, and holes for bytes (load_format dummy)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(dims)
    stored = {n: ("bfloat16", s, 2 * prod(s)) for n, s in shapes_of(config).items()}
    header = build_header(stored)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(nbytes for _, _, nbytes in stored.values()))
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(str(folder))
    return folder


def random_tensors(dims: str) -> dict[str, torch.Tensor]:
    """bfloat16 tensors on the current GPU, N(0, 0.02), views of one block."""
    torch.manual_seed(1)
    shapes = shapes_of(config_of(dims))
    flat = torch.empty(sum(prod(s) for s in shapes.values()), dtype=torch.bfloat16, device="cuda")
    for part in flat.split(1 << 30):
        part.normal_(0.0, 0.02)
    pieces = flat.split([prod(s) for s in shapes.values()])
    return {n: p.view(s) for (n, s), p in zip(shapes.items(), pieces, strict=True)}
