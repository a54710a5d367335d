"""`vime-hpc plan`: what travels where, told from a model directory's headers (a test with a real vLLM and one with the real trainer
hold the expectation against what they do)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.cli.main import main
from vime_hpc.weights.engine_layout import EngineLayout, Slice
from vime_hpc.weights.plan import TensorSpec, build_plan
from vime_hpc.weights.safetensors_index import build_header

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
    "tie_word_embeddings": True,
}
ATTENTION = {
    "input_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (128, 64),
    "self_attn.k_proj.weight": (64, 64),
    "self_attn.v_proj.weight": (64, 64),
    "self_attn.o_proj.weight": (64, 128),
    "self_attn.q_norm.weight": (32,),
    "self_attn.k_norm.weight": (32,),
    "post_attention_layernorm.weight": (64,),
    "mlp.gate.weight": (4, 64),
}
EXPERT = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
SHAPES: dict[str, tuple[int, ...]] = {
    "lm_head.weight": (288, 64),  # stored, but tied: it does not travel
    "model.embed_tokens.weight": (288, 64),
    "model.norm.weight": (64,),
    **{f"model.layers.{i}.{name}": shape for i in (0, 1) for name, shape in ATTENTION.items()},
    **{
        f"model.layers.{i}.mlp.experts.{e}.{name}.weight": shape
        for i in (0, 1)
        for e in range(4)
        for name, shape in EXPERT.items()
    },
}
NORMS = 4 * (64 + 2 * (2 * 64 + 2 * 32 + 4 * 64))  # bytes that every engine rank holds
ATTENTION_BYTES, EXPERT_BYTES = 4 * 2 * (128 + 64 + 64 + 128) * 64, 4 * 2 * 4 * 3 * 32 * 64
ROW = 4 * 64


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A configuration and a model directory of which only the header is real."""
    model, size = tmp_path / "model", {n: 4 * _count(s) for n, s in SHAPES.items()}
    model.mkdir()
    header = build_header({n: ("float32", s, size[n]) for n, s in SHAPES.items()})
    with (model / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(size.values()))
    (model / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{model}"\ndtype = "float32"\n[data]\ntrain = "unused"\n'
    )
    return ["plan", str(tmp_path / "run.toml")]


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*arguments, "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_engine_rank_receives_what_it_holds_from_every_pipeline_stage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--engine.tp=2", "--engine.num_engines=2", "--trainer.num_ranks=2", "--trainer.pp=2")
    plan = planned(arguments, capsys, *options)
    assert (plan["kind"], plan["tensors"], plan["whole"]) == ("expected", len(SHAPES) - 1, "")
    assert [s["tensors"] for s in plan["senders"]] == [1 + 21, 21 + 1]
    rest = NORMS + (ATTENTION_BYTES + EXPERT_BYTES) // 2
    # The vocabulary of 288 rows is filled up to 320, 160 a rank; the second one's last 32 are not sent.
    held, received = rest + 160 * ROW, [rest + 160 * ROW, rest + 128 * ROW]
    assert plan["engine_ranks"] == [
        {
            "engine": engine,
            "rank": rank,
            "part": rank,
            "received_bytes": received[rank],
            "held_bytes": held,
            "received_over_held": received[rank] / held,
        }
        for engine in (0, 1)
        for rank in (0, 1)
    ]


def test_every_expert_parallel_rank_of_the_trainer_sends_its_own_experts(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--engine.tp=1", "--trainer.num_ranks=4", "--trainer.pp=2", "--trainer.ep=2")
    plan = planned(arguments, capsys, *options)
    # 4 experts of 3 tensors a layer, 2 on each rank; 9 other tensors a layer; embedding first, norm last.
    assert [(s["name"], s["tensors"]) for s in plan["senders"]] == [
        ("stage 0, expert rank 0", 1 + 9 + 6),
        ("stage 0, expert rank 1", 6),
        ("stage 1, expert rank 0", 9 + 6 + 1),
        ("stage 1, expert rank 1", 6),
    ]
    assert sum(s["sent_bytes"] for s in plan["senders"]) == plan["nbytes"]
    assert [b["sender"] for b in plan["buckets"]] == [0, 1, 3, 2]  # the norm fills the last one up
    assert main([*arguments, *options]) == 0
    assert "  sender 3 (stage 1, expert rank 1): 6 tensors in 1 buckets" in capsys.readouterr().out


def test_expert_parallel_ranks_are_sent_their_experts_alone(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(arguments, capsys, "--engine.tp=2", "--vllm-enable-expert-parallel")
    first = plan["engine_ranks"][0]
    assert first["received_bytes"] == NORMS + (ATTENTION_BYTES + EXPERT_BYTES) // 2 + 160 * ROW
    assert first["received_over_held"] == 1.0


def test_more_ranks_than_key_heads_hold_them_twice(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(arguments, capsys, "--engine.tp=4")
    key_value = 4 * 2 * (64 + 64) * 64
    own = (ATTENTION_BYTES - key_value) // 4 + key_value // 2 + EXPERT_BYTES // 4
    assert plan["engine_ranks"][0]["received_bytes"] == NORMS + own + 80 * ROW


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "engine.tp = 1"),
        (["--engine.tp=2", "--weights.transport=disk"], "disk: one copy"),
        (["--engine.tp=2", "--weights.send=whole"], 'weights.send = "whole"'),
    ],
)
def test_where_whole_tensors_are_sent_the_plan_says_why(
    options: list[str], reason: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *options]) == 0
    out = capsys.readouterr().out
    assert f"every engine rank is sent every tensor whole ({reason}" in out
    assert ("ratio 1.9" in out) == ("--engine.tp=2" in options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine.tp=3"], "which 3 engine ranks cannot share evenly"),
        (["--engine.num_engines=0", "--run.mode=train_only"], "no weights travel in this run"),
        (["--trainer.tp=3", "--trainer.num_ranks=3"], "trainer.tp = 3 does not divide"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    options: list[str], message: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *options]) == 2
    assert message in capsys.readouterr().err


def test_of_a_run_it_is_the_plan_that_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"engine": {"tp": 2}, "trainer": {"pp": 1}}')
    assert main(["plan", str(tmp_path)]) == 2
    assert "no attempt has written a weight plan" in capsys.readouterr().err
    parts = ({"a": Slice((0,), (3,))}, {"a": Slice((3,), (5,))})
    layout = EngineLayout((0, 1), parts, (12, 40), unknown=("b",))
    plan = build_plan([TensorSpec("a", "float32", (8,)), TensorSpec("b", "uint8", (2,))], 1)
    attempt = tmp_path / "attempts" / "local.0"
    attempt.mkdir(parents=True)
    (attempt / "weight_plan.json").write_text(plan.with_layout(layout).to_json())
    assert main(["plan", str(tmp_path), "--buckets"]) == 0
    out = capsys.readouterr().out
    assert "recorded plan: 2 tensors" in out
    assert "sender 0 (stage 0): 2 tensors in 1 buckets" in out
    assert "bucket 1 of sender 0: 2 tensors from a; 0.00 MiB to part 0" in out
    assert "engine 0 rank 0 (part 0): receives 0.0 MiB, holds 0.0 MiB, ratio 1.167" in out
    assert "engine 0 rank 1 (part 1): receives 0.0 MiB, holds 0.0 MiB, ratio 0.550" in out
    assert "reads them otherwise than as a slice: b" in out


def test_it_needs_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from vime_hpc.cli.main import main\n"
        f"sys.exit(main({[*arguments, '--engine.tp=2']!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False)
    assert done.returncode == 0
