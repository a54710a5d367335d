"""`vime-hpc data`: what it writes, what it refuses, what it finds."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import pytest

from vime_hpc.cli import data
from vime_hpc.errors import ConfigError, PromptDataError


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    data.register(parser.add_subparsers(dest="command"))
    arguments = parser.parse_args(["data", *words])
    module, _, name = arguments.handler.partition(":")
    return int(getattr(importlib.import_module(module), name)(arguments))


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "policy"
    assert (
        command(
            "model", "--out", str(path), "--hidden", "32", "--layers", "1", "--intermediate", "32"
        )
        == 0
    )
    return path


def test_held_out_prompts_are_never_among_the_training_ones(tmp_path: Path) -> None:
    assert (
        command(
            "make", "--out", str(tmp_path), "--num-train", "120", "--num-eval", "40", "--seed", "3"
        )
        == 0
    )
    train, held_out = (
        [r["prompt"] for r in records(tmp_path / f"{n}.jsonl")] for n in ("train", "eval")
    )
    assert (len(set(train)), len(set(held_out))) == (120, 40)
    assert not set(train) & set(held_out)


def test_the_same_seed_makes_the_same_files_and_a_second_call_leaves_them(tmp_path: Path) -> None:
    words = (
        "--num-train",
        "20",
        "--num-eval",
        "5",
        "--prompt-format",
        "{expression}=",
        "--strip-spaces",
    )
    for name in ("a", "b", "a"):
        assert command("make", "--out", str(tmp_path / name), *words) == 0
    assert (tmp_path / "a/train.jsonl").read_bytes() == (tmp_path / "b/train.jsonl").read_bytes()
    first = records(tmp_path / "a/train.jsonl")[0]
    assert str(first["prompt"]).endswith("=")
    assert " " not in str(first["prompt"])
    assert eval(str(first["prompt"])[:-1]) == int(str(first["label"]))
    with pytest.raises(ConfigError, match="other options"):
        command("make", "--out", str(tmp_path / "a"), "--num-train", "21")


def test_a_task_with_too_few_prompts_says_how_many_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only 200 different prompts"):
        command(
            "make",
            "--out",
            str(tmp_path / "x"),
            "--num-train",
            "300",
            "--task-option",
            "max_digits=1",
        )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--task", "chain_summ"), r"--task chain_summ.*nearest: chain_sum, .*sorted"),
        (("--task-option", "max_digit=1"), "max_digit"),
        (("--prompt-format", "{expr}"), "expression"),
        (("--task-option", "x"), "KEY=VALUE"),
    ],
)
def test_options_that_cannot_work_are_named(
    tmp_path: Path, words: tuple[str, ...], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        command("make", "--out", str(tmp_path / "x"), "--num-train", "3", "--num-eval", "1", *words)


def test_labels_of_a_made_task_get_full_marks(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(
        "make",
        "--out",
        str(tmp_path),
        "--num-train",
        "10",
        "--num-eval",
        "2",
        "--task",
        "basic_arithmetic",
    )
    capsys.readouterr()
    words = (
        "check",
        str(tmp_path / "train.jsonl"),
        "--model",
        str(model),
        "--reward",
        "reasoning_gym",
        "--json",
    )
    assert command(*words) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_prompts"], result["num_labels_graded"], result["num_not_full_marks"]) == (
        10,
        20,
        0,
    )


@pytest.mark.parametrize("reward", ["math", "dapo"])
def test_labels_that_are_expressions_get_full_marks(
    tmp_path: Path, model: Path, reward: str
) -> None:
    path = tmp_path / "a.jsonl"
    labels = ["13", "1/2", "-4", "(1,2)", "x^2+1"]
    path.write_text(
        "".join(
            json.dumps({"prompt": f"q{i}", "label": lab}) + "\n" for i, lab in enumerate(labels)
        )
    )
    assert command("check", str(path), "--model", str(model), "--rm-type", reward) == 0


def test_labels_the_verifier_does_not_accept_are_shown(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "q", "label": "\\boxed{42}"}) + "\n")
    words = (
        "check",
        str(path),
        "--model",
        str(model),
        "--reward",
        "exact",
        "--reward-table",
        'extract="boxed"',
    )
    assert command(*words) == 3
    assert "read as '42'" in capsys.readouterr().out


def test_a_template_that_doubles_bos_is_reported(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vime_hpc.rollout.tiny_policy import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = "<s><s>{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "tok")
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "q"}\n')
    assert command("check", str(path), "--model", str(tmp_path / "tok")) == 3
    assert "more than one BOS" in capsys.readouterr().out


def test_a_broken_line_ends_the_check(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "q"}\n\n{"prompt"\n')
    with pytest.raises(PromptDataError, match="line 3") as caught:
        command("check", str(path), "--model", str(model))
    assert caught.value.exit_code == 3


def test_a_policy_has_the_sizes_asked_for_and_the_same_bytes_every_time(
    tmp_path: Path, model: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (
        32,
        1,
        288,
    )
    again = tmp_path / "again"
    command("model", "--out", str(again), "--hidden", "32", "--layers", "1", "--intermediate", "32")
    assert (again / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="multiple of 32"):
        command("model", "--out", str(tmp_path / "bad"), "--hidden", "33")


def test_a_moe_policy_is_made_with_per_expert_names(tmp_path: Path) -> None:
    from safetensors import safe_open

    command(
        "model",
        "--out",
        str(tmp_path / "moe"),
        "--hidden",
        "32",
        "--layers",
        "1",
        "--intermediate",
        "32",
        "--experts",
        "4",
    )
    with safe_open(tmp_path / "moe/model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.3.gate_proj.weight" in file.keys()  # noqa: SIM118 - not a dict
