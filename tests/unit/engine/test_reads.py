"""Promises of the tensors that watch a loader: what was read is known exactly, and no more than that has to be there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vime_hpc.engine.reads import Recording, model_tensors, parts_of_whole
from vime_hpc.errors import WeightsMismatchError
from vime_hpc.weights.engine_layout import EngineLayout, RankLayout, Slice

Tensors = dict[str, torch.Tensor]
WHOLE: Tensors = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for seed, (name, shape) in enumerate(
        {
            "rows": (8, 6),
            "columns": (8, 6),
            "transposed": (8, 6),
            "expert": (2, 4, 6),
            "other_type": (8, 6),
            "norm": (6,),
            "scalar": (1,),
            "merged": (8, 6),
            "retyped": (8, 6),
            "unread": (3, 3),
            "padding": (3, 3),
        }.items()
    )
}
SHAPES = {name: tuple(t.shape) for name, t in WHOLE.items()}


def load(tensors: Iterator[tuple[str, torch.Tensor]], rank: int) -> Tensors:
    """A loader of one of two tensor parallel ranks, with the cuts that vLLM's weight loaders make."""
    cuts = {
        "rows": lambda t: t.narrow(0, 4 * rank, 4),
        "columns": lambda t: t.narrow(1, 3 * rank, 3),
        "transposed": lambda t: t.t().narrow(0, 3 * rank, 3),
        "expert": lambda t: t[rank].chunk(2, 0)[1],
        "other_type": lambda t: t[4 * rank : 4 * rank + 4].to(torch.bfloat16).contiguous(),
        "norm": lambda t: t,
        "scalar": lambda t: t.reshape(()),
        "padding": lambda t: t.narrow(0, 3, 0),
        "retyped": lambda t: t.view(torch.int16)[rank],
        "merged": lambda t: t.reshape(-1)[:20],  # 3 rows and 2 elements: no slice
    }
    loaded = {}
    for name, tensor in tensors:
        if name in cuts:
            part = cuts[name](tensor)
            parameter = torch.nn.Parameter(
                torch.empty(part.shape, dtype=part.dtype), requires_grad=False
            )
            parameter.data.copy_(part)
            loaded[name] = parameter.data
    return loaded


def recorded(rank: int) -> RankLayout:
    recording = Recording(WHOLE.items())
    watched = load(iter(recording), rank)
    for name, expected in load(iter(WHOLE.items()), rank).items():
        assert torch.equal(watched[name], expected), name
    return recording.layout(7)


def sent(layout: RankLayout) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in WHOLE.items():
        if name in layout.slices:
            at = layout.slices[name]
            ranges = zip(at.start, at.shape, strict=True)
            tensor = tensor[tuple(slice(start, start + n) for start, n in ranges)].contiguous()
        yield name, tensor


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_load_tells_which_slice_of_every_tensor_a_rank_reads(
    rank: int, inference: bool
) -> None:
    with torch.inference_mode(inference):
        layout = recorded(rank)
    assert layout.slices == {
        "rows": Slice((4 * rank, 0), (4, 6)),
        "columns": Slice((0, 3 * rank), (8, 3)),
        "transposed": Slice((0, 3 * rank), (8, 3)),
        "expert": Slice((rank, 2, 0), (1, 2, 6)),
        "other_type": Slice((4 * rank, 0), (4, 6)),
        "unread": Slice((0, 0), (0, 0)),
        "padding": Slice((0, 0), (0, 0)),
    }
    assert layout.unknown == ("merged", "retyped")  # and so they count as read whole
    assert layout.held == 7


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_only_its_slices_loads_the_same_parameters(
    rank: int, inference: bool
) -> None:
    layout = recorded(rank)
    with torch.inference_mode(inference):
        loaded = load(parts_of_whole(sent(layout), layout.slices, SHAPES), rank)
    for name, expected in load(iter(WHOLE.items()), rank).items():
        assert torch.equal(loaded[name], expected), name


def test_a_read_outside_of_the_slice_is_an_error_that_names_tensor_and_places() -> None:
    layout = recorded(0)
    with pytest.raises(
        WeightsMismatchError, match=r"rows: its elements \[4:8, 0:6\] .* of \[8, 6\] \[0:4, 0:6\]"
    ):
        load(parts_of_whole(sent(layout), layout.slices, SHAPES), 1)


def test_a_read_that_is_no_slice_needs_the_whole_tensor() -> None:
    half = {"merged": Slice((0, 0), (4, 6))}
    parts = parts_of_whole([("merged", WHOLE["merged"][:4])], half, SHAPES)
    with pytest.raises(
        WeightsMismatchError, match=r"shape \[20\], strides \[1\] were read, .* \[0:4, 0:6\]"
    ):
        load(parts, 0)


def test_ranks_that_hold_the_same_are_one_part_and_a_layout_survives_json() -> None:
    ranks = [recorded(0), recorded(1), recorded(0), recorded(1)]
    ranks = [RankLayout.from_json(json.loads(json.dumps(r.to_json()))) for r in ranks]
    layout = EngineLayout.of_ranks(ranks)
    assert layout.part_of == (0, 1, 0, 1)
    assert layout.parts == (recorded(0).slices, recorded(1).slices)
    assert (layout.held, layout.unknown) == ((7, 7), ("merged", "retyped"))
    assert EngineLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize("shapes", [{}, {"rows": (8, 5)}, {"rows": (7, 6)}])
def test_slices_of_another_model_are_refused_by_name(shapes: dict[str, tuple[int, ...]]) -> None:
    layout = EngineLayout.of_ranks([RankLayout({"rows": Slice((4, 0), (4, 6))}, 7)])
    layout.refuse_unless_of({"rows": (8, 6)})
    with pytest.raises(WeightsMismatchError, match="reads rows from"):
        layout.refuse_unless_of(shapes)


def test_a_models_own_files_are_read_by_name_and_a_tied_head_is_left_out(tmp_path: Path) -> None:
    stored = {"a": torch.arange(6).bfloat16().view(2, 3), "lm_head.weight": torch.ones(2)}
    save_file(stored, tmp_path / "model-1.safetensors")
    save_file({"b": torch.tensor([7], dtype=torch.int64)}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    found = dict(model_tensors(tmp_path))
    assert found.keys() == {"a", "b"}
    assert torch.equal(found["a"], stored["a"])
    assert found["b"].tolist() == [7]


def test_a_tensor_that_no_rank_reads_is_refused_by_name() -> None:
    shapes = {"rows": (8, 6), "ignored": (3,)}
    nothing = Slice((0,), (0,))
    one_reads = EngineLayout.of_ranks([RankLayout({"ignored": nothing}, 7), RankLayout({}, 7)])
    one_reads.refuse_unless_of(shapes)
    none_reads = EngineLayout.of_ranks([RankLayout({"ignored": nothing}, 7)])
    with pytest.raises(WeightsMismatchError, match="no engine rank reads anything of ignored"):
        none_reads.refuse_unless_of(shapes)
