"""launchers/*.py: what they print is a whole batch script, and a typing error is the user's (code 2, one line)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SAID = {
    "submit_train": "num_ranks = 2",
    "submit_eval": 'mode = "rollout_only"',
    "submit_bench": 'requeue = "never"',
}
"""What each of them adds to the configuration inside the script."""


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "launchers" / f"{name}.py"), *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A configuration that can be checked: a model's config.json and files, and one prompt."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, '
        '"hidden_size": 64, "intermediate_size": 128, "vocab_size": 288}'
    )
    (folder / "model" / "model.safetensors").touch()
    (folder / "model" / "tokenizer.json").touch()
    (folder / "train.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    return [
        "configs/recipes/quickstart.toml",
        "--cluster=local_test",
        f"--model.path={folder / 'model'}",
        f"--data.train={folder / 'train.jsonl'}",
        "--data.eval=",
        f"--run.dir={folder / 'a run'}",
    ]


@pytest.mark.parametrize("name", SAID)
def test_a_dry_run_prints_the_script_and_submits_nothing(name: str, made: list[str]) -> None:
    answer = run(name, *made, "--dry-run")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("#!/bin/bash\n#SBATCH")
    assert SAID[name] in answer.stdout
    subprocess.run(["bash", "-n"], input=answer.stdout, text=True, check=True)
    assert "component 0" in answer.stderr
    assert not Path(made[-1].partition("=")[2]).exists()


@pytest.mark.parametrize("name", SAID)
def test_a_misspelt_option_is_named_with_the_one_that_was_meant(name: str, made: list[str]) -> None:
    answer = run(name, *made, "--run.num_step=3", "--dry-run")
    assert answer.returncode == 2
    assert "did you mean run.num_steps?" in answer.stderr
    assert "Traceback" not in answer.stderr
