"""Promises of the weight plan: it needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vime_hpc.errors import ConfigError, WeightsMismatchError
from vime_hpc.weights.engine_layout import EngineLayout, Slice
from vime_hpc.weights.plan import (
    ALIGNMENT,
    TensorSpec,
    WeightPlan,
    build_plan,
    refuse_unless_complete,
)

KIB = 1024


def specs() -> list[TensorSpec]:
    return [
        TensorSpec("b", "float32", (64 * KIB,), 0),  # 256 KiB
        TensorSpec("a", "bfloat16", (3,), 0),  # 6 bytes
        TensorSpec("huge", "float32", (1024 * KIB,), 0),  # 4 MiB, more than a bucket
        TensorSpec("c", "float32", (192 * KIB,), 1),
        TensorSpec("d", "float32", (64 * KIB,), 1),
        TensorSpec("e", "float32", (1,), 1),
    ]


def test_tensors_keep_their_order_and_a_bucket_never_exceeds_its_limit_unless_one_tensor_does() -> (
    None
):
    plan = build_plan(specs(), bucket_mib=1)
    found = [(b.source, [t.name for t in b.tensors], b.nbytes) for b in plan.buckets]
    assert found == [
        (0, ["b", "a"], 256 * KIB + 6),
        (0, ["huge"], 4096 * KIB),
        (1, ["c", "d"], 1024 * KIB),
        (1, ["e"], 4),
    ]
    assert plan.names == ("b", "a", "huge", "c", "d", "e")
    assert plan.num_sources == 2


def of_two_expert_ranks() -> list[TensorSpec]:
    """Two layers; what is no expert is sent by source 0, each source sends an expert of every layer."""
    mib = (256 * KIB,)
    return [
        TensorSpec(f"{layer}.{what}", "float32", mib, source)
        for layer in (0, 1)
        for what, source in (("norm", 0), ("expert0", 0), ("expert1", 1))
    ]


def test_buckets_of_several_senders_stand_in_the_order_of_the_tensors_that_fill_them_up() -> None:
    single = build_plan(of_two_expert_ranks(), bucket_mib=1)
    assert [(b.source, b.tensors[0].name) for b in single.buckets] == [
        (s.source, s.name) for s in of_two_expert_ranks()
    ]
    pairs = build_plan(of_two_expert_ranks(), bucket_mib=2)
    assert [(b.source, [t.name for t in b.tensors]) for b in pairs.buckets] == [
        (0, ["0.norm", "0.expert0"]),
        (0, ["1.norm", "1.expert0"]),
        (1, ["0.expert1", "1.expert1"]),
    ]


def test_a_senders_rounds_hold_its_own_tensors_and_a_part_receives_those_of_all_in_one_order() -> (
    None
):
    mib, nothing = (256 * KIB,), Slice((0,), (0,))
    experts = {f"{layer}.expert{n}": nothing for layer in (0, 1) for n in (0, 1)}
    first = {name: nothing for name in experts if name.endswith("1")}
    second = {name: nothing for name in experts if name.endswith("0")}
    layout = EngineLayout((0, 1), (first, second), (0, 0))
    plan = build_plan(of_two_expert_ranks(), bucket_mib=1).with_layout(layout)
    sent = [
        [(one.bucket.tensors[0].name, [part for part, _ in one.sent]) for one in plan.rounds(s)]
        for s in (0, 1)
    ]
    assert sent == [
        [("0.norm", [0, 1]), ("0.expert0", [0]), ("1.norm", [0, 1]), ("1.expert0", [0])],
        [("0.expert1", [1]), ("1.expert1", [1])],
    ]
    received = [[(b.source, b.tensors[0].name) for b in plan.buckets_of(part)] for part in (0, 1)]
    assert received == [
        [(0, "0.norm"), (0, "0.expert0"), (0, "1.norm"), (0, "1.expert0")],
        [(0, "0.norm"), (1, "0.expert1"), (0, "1.norm"), (1, "1.expert1")],
    ]
    assert all(t.shape == mib for part in (0, 1) for b in plan.buckets_of(part) for t in b.tensors)


def test_tensors_of_a_bucket_do_not_overlap_and_are_aligned() -> None:
    odd = [TensorSpec(f"t{i}", "bfloat16", (i + 1,)) for i in range(40)]
    (bucket,) = build_plan(odd, bucket_mib=1).buckets
    end = 0
    for t in bucket.tensors:
        assert t.offset >= end
        assert t.offset % ALIGNMENT == 0
        end = t.offset + t.nbytes
    assert end == bucket.nbytes


def test_a_plan_survives_json_and_equal_input_gives_an_equal_digest() -> None:
    plan = build_plan(specs(), bucket_mib=1)
    again = WeightPlan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == build_plan(specs(), bucket_mib=1).digest
    assert again.digest != build_plan(specs(), bucket_mib=2).digest


HALVES = EngineLayout(
    (0, 1, 0, 1),
    (
        {"b": Slice((0,), (32 * KIB,)), "c": Slice((0,), (0,))},
        {"b": Slice((32 * KIB,), (32 * KIB,)), "huge": Slice((0,), (0,))},
    ),
    (0, 0),
)
"""Two engines of two ranks: b in halves, c only on the second rank of each, huge only on the first."""


def test_with_a_layout_every_bucket_travels_once_to_each_part_cut_to_what_it_holds() -> None:
    plan = build_plan(specs(), bucket_mib=1).with_layout(HALVES)
    found = [
        [(part, [(t.name, t.shape, t.offset) for t in b.tensors], b.nbytes) for part, b in r.sent]
        for source in (0, 1)
        for r in plan.rounds(source)
    ]
    half, b_and_a = 32 * KIB, 128 * KIB + 6
    assert found == [
        [(p, [("b", (half,), 0), ("a", (3,), 4 * half)], b_and_a) for p in (0, 1)],
        [(0, [("huge", (1024 * KIB,), 0)], 4096 * KIB)],
        [
            (0, [("d", (64 * KIB,), 0)], 256 * KIB),
            (1, [("c", (192 * KIB,), 0), ("d", (64 * KIB,), 768 * KIB)], 1024 * KIB),
        ],
        [(0, [("e", (1,), 0)], 4), (1, [("e", (1,), 0)], 4)],
    ]
    assert plan.received(0) == b_and_a + 4096 * KIB + 256 * KIB + 4
    assert plan.received(1) == b_and_a + 1024 * KIB + 4
    assert (plan.num_parts, plan.part_of) == (2, (0, 1, 0, 1))
    assert plan.specs() == build_plan(specs(), bucket_mib=1).specs()  # of the whole tensors
    assert WeightPlan.from_json(plan.to_json()) == plan


def test_without_a_layout_all_engine_ranks_are_sent_everything_and_the_plan_says_why() -> None:
    plan = build_plan(specs(), bucket_mib=1).with_layout(HALVES).sent_whole("no files to read")
    assert [r.sent for s in (0, 1) for r in plan.rounds(s)] == [((0, b),) for b in plan.buckets]
    assert (plan.num_parts, plan.part_of, plan.whole) == (1, (), "no files to read")
    assert WeightPlan.from_json(plan.to_json()) == plan


def test_a_layout_of_another_model_is_refused() -> None:
    layout = EngineLayout((0,), ({"b": Slice((1,), (64 * KIB,))},), (0,))
    with pytest.raises(WeightsMismatchError, match="reads b from"):
        build_plan(specs(), bucket_mib=1).with_layout(layout)


def test_a_plan_of_another_format_is_refused() -> None:
    text = build_plan(specs(), bucket_mib=1).to_json().replace('"format":3', '"format":9')
    with pytest.raises(WeightsMismatchError, match="format 9"):
        WeightPlan.from_json(text)
    with pytest.raises(WeightsMismatchError, match="not a weight plan"):
        WeightPlan.from_json("{}")


def test_a_name_listed_twice_is_refused_by_name() -> None:
    with pytest.raises(WeightsMismatchError, match="twice: a"):
        build_plan([*specs(), TensorSpec("a", "float32", (1,), 1)], bucket_mib=1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([TensorSpec("x", "complex64", (1,))], "complex64"),
        ([TensorSpec("x", "float32", (1,), 1)], r"senders without a tensor.*\[0\]"),
        ([], "at least one tensor"),
    ],
)
def test_an_impossible_plan_is_refused(bad: list[TensorSpec], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_plan(bad, bucket_mib=1)


def test_missing_surplus_and_misshapen_tensors_are_named() -> None:
    expected = {
        "lm_head.weight": ("float32", (512, 64)),
        "a": ("float32", (2, 3)),
        "b": ("float32", (4,)),
    }
    found = {"extra": ("float32", (1,)), "a": ("float32", (3, 2)), "b": ("bfloat16", (4,))}
    with pytest.raises(WeightsMismatchError) as error:
        refuse_unless_complete(found, expected, where="engine 0")
    text = str(error.value)
    assert "engine 0" in text
    assert "1 missing: lm_head.weight" in text
    assert "1 surplus: extra" in text
    assert "a is [3, 2], expected [2, 3]" in text
    assert (
        "b" not in text.split("misshapen: ")[1].split(".")[0].split()
    )  # a dtype may differ: the receiver casts


def test_equal_sets_pass() -> None:
    same = {"a": ("float32", (2, 3))}
    refuse_unless_complete(same, dict(same), where="here")


def test_plan_digest_and_version_import_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import vime_hpc.weights.plan, vime_hpc.weights.digest, vime_hpc.weights.version\n"
        "import vime_hpc.weights.safetensors_index"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
