"""Conversions between Hugging Face and Megatron tensors are exact inverses, cut or whole."""

from __future__ import annotations

import pytest
import torch

from vime_hpc.errors import ConfigError
from vime_hpc.trainer.families import FAMILIES, family_of
from vime_hpc.trainer.families.base import Conversion, rope_parameters, shard, unshard
from vime_hpc.trainer.layout import SUPPORTED_ARCHITECTURES

HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "hidden_size": 16,
    "vocab_size": 10,
    "num_hidden_layers": 2,
    "intermediate_size": 12,
    "rms_norm_eps": 1e-6,
}
NAMES = {
    "embedding.word_embeddings.weight": [(10, 16)],
    "output_layer.weight": [(10, 16)],
    "decoder.final_layernorm.weight": [(16,)],
    "decoder.layers.1.self_attention.linear_qkv.weight": [(32, 16), (16, 16), (16, 16)],
    "decoder.layers.1.self_attention.linear_qkv.bias": [(32,), (16,), (16,)],
    "decoder.layers.1.self_attention.linear_proj.weight": [(16, 32)],
    "decoder.layers.1.mlp.linear_fc1.weight": [(12, 16), (12, 16)],
    "decoder.layers.1.mlp.linear_fc2.weight": [(16, 12)],
    "decoder.layers.1.mlp.experts.local_experts.5.linear_fc1.weight": [(12, 16), (12, 16)],
    "decoder.layers.1.mlp.experts.local_experts.5.linear_fc2.weight": [(16, 12)],
}


def conversion_of(name: str, tp: int) -> Conversion:
    return family_of(HF).conversion(name, HF, -(-10 // tp) * tp)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_to_megatron_cut_joined_and_back_is_the_identity(name: str, tp: int) -> None:
    tensors = [torch.randn(shape) for shape in NAMES[name]]
    conversion = conversion_of(name, tp)
    assert len(conversion.names) == len(tensors)
    parts = [shard(conversion.join(tensors), conversion.cut, rank, tp) for rank in range(tp)]
    assert len({part.shape for part in parts}) == 1
    for back, tensor in zip(conversion.split(unshard(parts, conversion.cut)), tensors, strict=True):
        assert torch.equal(back, tensor)


def test_query_key_value_are_interleaved_by_group() -> None:
    """One head per group, head_dim 1: group g's rows are q_g, k_g, v_g."""
    hf = HF | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 1}
    conversion = family_of(hf).conversion(
        "decoder.layers.0.self_attention.linear_qkv.weight", hf, 10
    )
    q, k, v = (torch.tensor([[base + 0.0], [base + 1.0]]) for base in (10, 20, 30))
    assert conversion.join([q, k, v]).flatten().tolist() == [10, 20, 30, 11, 21, 31]


def test_gate_and_up_are_cut_each_on_its_own() -> None:
    conversion = conversion_of("decoder.layers.0.mlp.linear_fc1.weight", 2)
    full = conversion.join([torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])])
    assert shard(full, conversion.cut, 0, 2).flatten().tolist() == [1, 3]
    assert shard(full, conversion.cut, 1, 2).flatten().tolist() == [2, 4]


def test_tied_models_make_the_output_from_the_input_embedding() -> None:
    hf = HF | {"tie_word_embeddings": True}
    assert family_of(hf).conversion("output_layer.weight", hf, 10).names == (
        "model.embed_tokens.weight",
    )
    assert family_of(HF).conversion("output_layer.weight", HF, 10).names == ("lm_head.weight",)


def test_unknown_parameters_and_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no Hugging Face name"):
        conversion_of("decoder.layers.0.mlp.linear_fc9.weight", 1)
    with pytest.raises(ConfigError, match="'BloomForCausalLM' is not supported"):
        family_of({"architectures": ["BloomForCausalLM"]})
    with pytest.raises(ConfigError, match="use_sliding_window"):
        family_of(HF).transformer_kwargs(HF | {"use_sliding_window": True})


def test_the_layout_check_knows_exactly_the_families() -> None:
    assert set(SUPPORTED_ARCHITECTURES) == set(FAMILIES)


def test_rope_is_read_from_the_files_of_transformers_4_and_5() -> None:
    assert rope_parameters({"rope_theta": 5e5})["rope_theta"] == 5e5
    assert (
        rope_parameters({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})[
            "rope_theta"
        ]
        == 1e6
    )
    with pytest.raises(ConfigError, match="'yarn'"):
        rope_parameters({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
