"""Where tensors lie in an engine's parameters, on a model with vLLM's parameter names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

from vime_hpc.engine.placement import find_placement
from vime_hpc.weights.bridge import cut_tensor
from vime_hpc.weights.device_digest import WORD, flat_digests, words_of
from vime_hpc.weights.digest import tensor_digest
from vime_hpc.weights.engine_layout import EngineLayout, RankLayout, Slice
from vime_hpc.weights.plan import Bucket, TensorSpec, WeightPlan, build_plan
from vime_hpc.weights.staging import view

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
    """Parameters as vLLM names and lays them on a rank that holds 1/`share` of each, and so many experts; the vocabulary is padded
    by `padding` rows.
    """

    def __init__(self, padding: int = 4, share: int = 1, experts: int = E) -> None:
        super().__init__()
        v, q, kv, f = V // share + padding, Q // share, KV // share, F // share
        for name, shape in {
            "model.embed_tokens.weight": (v, H), "model.norm.weight": (H,), "lm_head.weight": (v, H),
            "model.layers.0.self_attn.qkv_proj.weight": (q + 2 * kv, H), "model.layers.0.self_attn.qkv_proj.bias": (q + 2 * kv,),
            "model.layers.0.mlp.gate_up_proj.weight": (2 * f, H), "model.layers.0.mlp.down_proj.weight": (H, f),
            "model.layers.1.mlp.gate.weight": (E, H),
            "model.layers.1.mlp.experts.routed_experts.w13_weight": (experts, 2 * (F if experts < E else f), H),
            "model.layers.1.mlp.experts.routed_experts.w2_weight": (experts, H, F if experts < E else f),
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


def layout_of(values: dict[str, torch.Tensor], *, expert_parallel: bool) -> EngineLayout:
    """Two ranks with half of the rows or columns; of experts, or (expert parallel) expert 0 on the first and 1, 2 on the other."""

    def found(name: str, shape: tuple[int, ...], rank: int) -> Slice | None:
        if "norm" in name or ".gate." in name:
            return None
        if expert_parallel and ".experts." in name:
            own = (".experts.0." in name) == (rank == 0)
            return None if own else Slice((0, 0), (0, 0))
        at = 1 if "down_proj" in name else 0
        half = shape[at] // 2
        start = tuple(rank * half * (d == at) for d in range(len(shape)))
        return Slice(start, tuple(half if d == at else n for d, n in enumerate(shape)))

    def rank_layout(rank: int) -> RankLayout:
        of_all = {n: found(n, tuple(t.shape), rank) for n, t in values.items()}
        return RankLayout({n: s for n, s in of_all.items() if s is not None}, 1)

    return EngineLayout.of_ranks([rank_layout(0), rank_layout(1)])


def filled(
    buckets: Sequence[Bucket], values: dict[str, torch.Tensor]
) -> Iterator[tuple[Bucket, list[torch.Tensor]]]:
    return ((bucket, [values[t.name] for t in bucket.tensors]) for bucket in buckets)


def digests_of(plan: WeightPlan, values: dict[str, torch.Tensor]) -> dict[str, str]:
    found: dict[str, str] = {}
    for bucket in plan.buckets:
        flat = torch.zeros(WORD * words_of(bucket), dtype=torch.uint8)
        for placed in bucket.tensors:
            view(flat, placed).copy_(values[placed.name])
        found |= flat_digests(flat, bucket)
    return found


def test_loaded_tensors_lie_where_vllm_keeps_them_and_read_back() -> None:
    values, model = tensors(), Fused()
    plan = plan_of(values)
    placement = find_placement(model, plan.buckets)
    assert placement is not None
    assert not placement.reads_back(plan.buckets, digests_of(plan, values))
    placement.load(filled(plan.buckets, values))
    assert placement.reads_back(plan.buckets, digests_of(plan, values))
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
    placement = find_placement(model, plan.buckets)
    assert placement is not None
    placement.load(filled(plan.buckets, values))
    with torch.no_grad():
        fused = model.get_parameter("model.layers.0.mlp.gate_up_proj.weight")
        fused.copy_(torch.cat(fused.chunk(2)[::-1]))
    assert not placement.reads_back(plan.buckets, digests_of(plan, values))


@pytest.mark.parametrize("on_device", [True, False])
def test_a_byte_written_into_a_parameter_is_told_by_the_tensors_name(on_device: bool) -> None:
    values, model = tensors(), Fused()
    plan = plan_of(values)
    placement = find_placement(model, plan.buckets)
    assert placement is not None
    placement.load(filled(plan.buckets, values))
    digests = digests_of(plan, values)
    if not on_device:  # what travels over process groups and files has digests of its bytes
        digests = {
            n: tensor_digest(t.flatten().view(torch.uint8).numpy(), "float32", tuple(t.shape))
            for n, t in values.items()
        }
    assert placement.different(plan.buckets, digests, on_device=on_device) == []
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.qkv_proj.weight")[Q + 1, 2] += 1e-6
        model.get_parameter("model.layers.1.mlp.experts.routed_experts.w2_weight")[2, 0, 0] *= -1
    assert sorted(placement.different(plan.buckets, digests, on_device=on_device)) == [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.experts.2.down_proj.weight",
    ]


def test_a_parameter_nobody_sends_or_a_tensor_without_a_place_means_no_placement() -> None:
    values, model = tensors(), Fused()
    plan = plan_of({name: t for name, t in values.items() if "down_proj" not in name})
    assert find_placement(model, plan.buckets) is None
    assert (
        find_placement(
            model, plan_of(values | {"model.layers.0.extra.weight": torch.zeros(2)}).buckets
        )
        is None
    )
    quantised = Fused()
    quantised.quant_method = type("Fp8LinearMethod", (), {})()
    assert find_placement(quantised, plan_of(values).buckets) is None


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_finds_the_places_of_the_slices_it_receives(
    rank: int, expert_parallel: bool
) -> None:
    values = tensors()
    layout = layout_of(values, expert_parallel=expert_parallel)
    buckets, slices = plan_of(values).with_layout(layout).buckets_of(rank), layout.parts[rank]
    received = {n: cut_tensor(t, slices[n]) if n in slices else t for n, t in values.items()}
    received = {n: t for n, t in received.items() if t.numel()}
    model = Fused(padding=2, share=2, experts=(1, 2)[rank] if expert_parallel else E)
    placement = find_placement(model, buckets)
    assert placement is not None
    placement.load(filled(buckets, received))
    digests = {
        name: tensor_digest(t.contiguous().flatten().view(torch.uint8).numpy(), "float32", t.shape)
        for name, t in received.items()
    }
    assert placement.different(buckets, digests, on_device=False) == []
    held, layer = dict(model.named_parameters()), "model.layers.0.self_attn"
    together = torch.cat([values[f"{layer}.{x}_proj.weight"].chunk(2)[rank] for x in "qkv"])
    assert torch.equal(held[f"{layer}.qkv_proj.weight"], together)
    last = held["model.layers.1.mlp.experts.routed_experts.w2_weight"][-1]
    number = 0 if expert_parallel and rank == 0 else E - 1
    down = values[f"model.layers.1.mlp.experts.{number}.down_proj.weight"]
    assert torch.equal(last, down if expert_parallel else down.chunk(2, 1)[rank])
