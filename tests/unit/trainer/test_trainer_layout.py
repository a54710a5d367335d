"""Layouts are refused from config.json alone, before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.config.parts import TrainerConfig
from vime_hpc.errors import ConfigError
from vime_hpc.trainer.layout import check_layout, read_hf_config

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 96,
    "hidden_size": 64,
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "moe_intermediate_size": 32,
}


def layout(**options: Any) -> TrainerConfig:
    size = options.get("tp", 1) * options.get("pp", 1) * options.get("cp", 1)
    return TrainerConfig(num_ranks=options.pop("num_ranks", size), **options)


@pytest.mark.parametrize(
    "options", [{}, {"tp": 4}, {"pp": 3}, {"tp": 2, "pp": 2}, {"num_ranks": 8}]
)
def test_layouts_that_fit_pass(options: dict[str, Any]) -> None:
    check_layout(DENSE, layout(**options))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            DENSE,
            {"tp": 3},
            r"trainer\.tp = 3 does not divide the model's 8 attention heads .*1, 2, 4, 8",
        ),
        (
            DENSE,
            {"tp": 8},
            r"trainer\.tp = 8 does not divide the model's 4 key/value heads .*1, 2, 4",
        ),
        (DENSE, {"pp": 4}, r"trainer\.pp = 4 does not divide the model's 6 layers .*1, 2, 3, 6"),
        (DENSE, {"cp": 2}, r"trainer\.cp = 2"),
        (DENSE, {"ep": 2}, r"trainer\.ep = 2, but Qwen3ForCausalLM has no experts"),
        (MOE, {"ep": 3, "num_ranks": 3}, r"trainer\.ep = 3 does not divide the model's 8 experts"),
        (MOE, {"ep": 4, "num_ranks": 2}, r"trainer\.ep = 4 does not divide the model's 2 ranks"),
        (MOE, {"tp": 2}, r"sequence_parallel = true"),
        (
            DENSE | {"architectures": ["GPT2LMHeadModel"]},
            {},
            r"'GPT2LMHeadModel' is not supported.*Qwen3ForCausalLM",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused_with_the_numbers(
    model: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(model, layout(**options))


def test_a_model_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a directory.*no internet"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert read_hf_config(tmp_path) == DENSE


@pytest.mark.parametrize("module", ["vime_hpc.trainer.layout", "vime_hpc.trainer.packing"])
def test_planning_needs_no_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
