"""Where tensors lie in an engine's parameters, on a model with vLLM's parameter names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vime_hpc.engine.placement import find_placement
from vime_hpc.weights.device_digest import WORD, named_digests, word_sums, words_of

from vime_hpc.weights.bridge import fill  # isort: skip
from vime_hpc.weights.digest import tensor_digest
from vime_hpc.weights.plan import TensorSpec, WeightPlan, build_plan

H, Q, KV, F, V, E = 8, 16, 8, 12, 20, 3


def tensors() -> dict[str, torch.Tensor]:
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H),
        f"{layer}.self_attn.q_proj.weight": (Q, H), f"{layer}.self_attn.k_proj.weight": (KV, H),
        f"{layer}.self_attn.v_proj.weight": (KV, H), f"{layer}.self_attn.q_proj.bias": (Q,),
        f"{layer}.self_attn.k_proj.bias": (KV,), f"{layer}.self_attn.v_proj.bias": (KV,),
        f"{layer}.mlp.gate_proj.weight": (F, H), f"{layer}.mlp.up_proj.weight": (F, H), f"{layer}.mlp.down_proj.weight": (H, F),
        "model.layers.1.mlp.gate.weight": (E, H),
    }  # fmt: skip
    for e in range(E):
        head = f"model.layers.1.mlp.experts.{e}"
        shapes |= {
            f"{head}.gate_proj.weight": (F, H),
            f"{head}.up_proj.weight": (F, H),
            f"{head}.down_proj.weight": (H, F),
        }
    torch.manual_seed(1)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


class Fused(nn.Module):
    """Parameters as vLLM names and lays them; the vocabulary is padded by `padding` rows."""

    def __init__(self, padding: int = 4) -> None:
        super().__init__()
        for name, shape in {
            "model.embed_tokens.weight": (V + padding, H), "model.norm.weight": (H,), "lm_head.weight": (V + padding, H),
            "model.layers.0.self_attn.qkv_proj.weight": (Q + 2 * KV, H), "model.layers.0.self_attn.qkv_proj.bias": (Q + 2 * KV,),
            "model.layers.0.mlp.gate_up_proj.weight": (2 * F, H), "model.layers.0.mlp.down_proj.weight": (H, F),
            "model.layers.1.mlp.gate.weight": (E, H), "model.layers.1.mlp.experts.routed_experts.w13_weight": (E, 2 * F, H),
            "model.layers.1.mlp.experts.routed_experts.w2_weight": (E, H, F),
        }.items():  # fmt: skip
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))


def plan_of(values: dict[str, torch.Tensor]) -> WeightPlan:
    return build_plan(
        [TensorSpec(name, "float32", tuple(t.shape)) for name, t in values.items()], 1
    )


def digests_of(plan: WeightPlan, values: dict[str, torch.Tensor]) -> dict[str, str]:
    found: dict[str, str] = {}
    for bucket in plan.buckets:
        flat = torch.zeros(WORD * words_of(bucket), dtype=torch.uint8)
        for placed in bucket.tensors:
            fill(flat, placed, (placed.name, values[placed.name]))
        found |= named_digests(word_sums(flat, bucket), bucket)
    return found


def test_loaded_tensors_lie_where_vllm_keeps_them_and_read_back() -> None:
    values, model = tensors(), Fused()
    plan = plan_of(values)
    placement = find_placement(model, plan)
    assert placement is not None
    assert not placement.reads_back(plan, digests_of(plan, values))
    placement.load(values.items())
    assert placement.reads_back(plan, digests_of(plan, values))
    held = dict(model.named_parameters())
    layer = "model.layers.0.self_attn"
    together = torch.cat([values[f"{layer}.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(held[f"{layer}.qkv_proj.weight"], together)
    last = held["model.layers.1.mlp.experts.routed_experts.w13_weight"][E - 1]
    assert torch.equal(last[F:], values[f"model.layers.1.mlp.experts.{E - 1}.up_proj.weight"])
    assert torch.equal(held["lm_head.weight"][:V], values["lm_head.weight"])
    assert not held["lm_head.weight"][V:].any()


def test_gate_and_up_the_other_way_round_do_not_read_back() -> None:
    values, model = tensors(), Fused()
    plan = plan_of(values)
    placement = find_placement(model, plan)
    assert placement is not None
    placement.load(values.items())
    with torch.no_grad():
        fused = model.get_parameter("model.layers.0.mlp.gate_up_proj.weight")
        fused.copy_(torch.cat(fused.chunk(2)[::-1]))
    assert not placement.reads_back(plan, digests_of(plan, values))


@pytest.mark.parametrize("on_device", [True, False])
def test_a_byte_written_into_a_parameter_is_told_by_the_tensors_name(on_device: bool) -> None:
    values, model = tensors(), Fused()
    plan = plan_of(values)
    placement = find_placement(model, plan)
    assert placement is not None
    placement.load(values.items())
    digests = digests_of(plan, values)
    if not on_device:  # what travels over process groups and files has digests of its bytes
        digests = {
            n: tensor_digest(t.flatten().view(torch.uint8).numpy(), "float32", tuple(t.shape))
            for n, t in values.items()
        }
    assert placement.different(plan, digests, on_device=on_device) == []
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.qkv_proj.weight")[Q + 1, 2] += 1e-6
        model.get_parameter("model.layers.1.mlp.experts.routed_experts.w2_weight")[2, 0, 0] *= -1
    assert sorted(placement.different(plan, digests, on_device=on_device)) == [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.experts.2.down_proj.weight",
    ]


def test_a_parameter_nobody_sends_or_a_tensor_without_a_place_means_no_placement() -> None:
    values, model = tensors(), Fused()
    plan = plan_of({name: t for name, t in values.items() if "down_proj" not in name})
    assert find_placement(model, plan) is None
    assert (
        find_placement(model, plan_of(values | {"model.layers.0.extra.weight": torch.zeros(2)}))
        is None
    )
    quantised = Fused()
    quantised.quant_method = type("Fp8LinearMethod", (), {})()
    assert find_placement(quantised, plan_of(values)) is None
