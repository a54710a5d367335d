"""What would end a job minutes after its start is refused before anything is started or written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime_hpc.cli.main import main
from vime_hpc.cli.preflight import check, keep_foreign_modules_out
from vime_hpc.config.load import load_config
from vime_hpc.errors import ConfigError, PromptDataError

ROOT = Path(__file__).parents[3]
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "model" / "tokenizer.json").touch()
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    return tmp_path


def checked(made: Path, *more: str, import_plugins: bool = True) -> None:
    options = [f"--model.path={made / 'model'}", f"--data.train={made / 'train.jsonl'}"]
    check(load_config([], [*options, *more]), import_plugins=import_plugins)


def test_what_can_work_passes(made: Path) -> None:
    checked(made)
    checked(made, '--rollout.filters=["zero_spread"]', "--rollout.reward=math")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--algorithm.advantage=gprpo", r'algorithm\.advantage = "gprpo" is unknown; did you mean'),
        ("--rollout.reward=exakt", r'rollout\.reward = "exakt" is unknown; did you mean exact\?'),
        ('--rollout.filters=["zero"]', r'rollout\.filters = "zero" is unknown'),
        ("--rollout.generate=mine", r'rollout\.generate = "mine" is unknown; a dotted path'),
        ("--rollout.reward=no_such_module:f", "there is no module no_such_module"),
        ("--algorithm.advantage=json:nope", "json has no nope"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(made: Path, option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(made, option)


def test_a_warm_up_longer_than_the_run_is_refused(made: Path) -> None:
    short = ["--run.num_steps=2", "--optimizer.warmup_updates=3"]
    with pytest.raises(ConfigError, match=r"only 2 updates .*--run\.until=N"):
        checked(made, *short)
    checked(made, *short, "--algorithm.updates_per_step=2")
    checked(made, *short, "--run.mode=rollout_only")


def test_names_that_a_run_does_not_use_may_be_anything(made: Path) -> None:
    checked(made, "--rollout.reward=nope", "--run.mode=train_only")
    checked(made, "--rollout.reward=nope", "--algorithm.loss=sft", "--engine.num_engines=0")


def test_a_module_beside_the_command_is_found_as_the_ranks_find_it(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    (made / "rewards_beside.py").write_text("def f(sample, prompt, table): return 1.0\n")
    checked(made, "--rollout.reward=rewards_beside:f")


@pytest.mark.parametrize(
    ("option", "code", "said"),
    [
        (
            "rollout.reward",
            "def f(sample): ...",
            r"takes \(sample\), and is called with \(sample, ",
        ),
        ("rollout.filters", "def f(): ...", r"called with \(group, table\): too many"),
        ("algorithm.advantage", "def f(rewards, *rest, scale): ...", "missing a required .*scale"),
        ("rollout.generate", "async def f(*everything): ...", ""),
        ("rollout.reward", "class C:\n    def __call__(self, s, p, t): ...\nf = C()", ""),
    ],
)
def test_a_function_that_cannot_be_called_as_it_will_be_is_refused(
    made: Path, monkeypatch: pytest.MonkeyPatch, option: str, code: str, said: str
) -> None:
    name = f"called_{abs(hash((option, code)))}"
    (made / f"{name}.py").write_text(code + "\n")
    monkeypatch.syspath_prepend(str(made))
    path = f"['{name}:f']" if option == "rollout.filters" else f"{name}:f"
    if not said:
        checked(made, f"--{option}={path}")
        return
    with pytest.raises(ConfigError, match=said):
        checked(made, f"--{option}={path}")


def test_no_module_is_taken_from_a_directory_that_all_may_write_to(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    keep_foreign_modules_out()
    assert os.environ["PYTHONSAFEPATH"] == ""
    made.chmod(0o1777)
    keep_foreign_modules_out()
    code = "import sys, os; print(os.getcwd() in sys.path or '' in sys.path)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "False\n"
    (made / "rewards_planted.py").write_text("def f(sample, prompt, table): return 1.0\n")
    with pytest.raises(ConfigError, match="there is no module rewards_planted"):
        checked(made, "--rollout.reward=rewards_planted:f")


def test_a_login_node_need_not_have_the_jobs_modules(made: Path) -> None:
    checked(made, "--rollout.reward=only_in_the_job:f", import_plugins=False)
    with pytest.raises(ConfigError, match="is unknown"):
        checked(made, "--rollout.reward=exakt", import_plugins=False)


def test_a_launcher_of_one_checkout_starts_no_ranks_of_another_one(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.chdir(ROOT)
    keep_foreign_modules_out()
    assert os.environ["PYTHONSAFEPATH"] == ""
    monkeypatch.chdir(made)
    (made / "vime_hpc").mkdir()
    keep_foreign_modules_out()
    assert os.environ["PYTHONSAFEPATH"] == "1"


def test_a_job_submitted_from_a_directory_that_all_may_write_to_imports_nothing_there(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.chdir(made)
    made.chmod(0o1777)
    options = [f"--model.path={made / 'model'}", f"--data.train={made / 'train.jsonl'}"]
    recipe = ROOT / "configs" / "ci" / "tiny.toml"
    cluster = f"--cluster={ROOT / 'configs' / 'clusters' / 'local_test.toml'}"
    assert main(["submit", str(recipe), *options, "--data.eval=", cluster, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash")
    assert os.environ["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("model.safetensors", r"has no \*\.safetensors; it holds config\.json, tokenizer\.json"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_a_model_directory_copied_in_part_is_refused(made: Path, missing: str, said: str) -> None:
    (made / "model" / missing).unlink()
    with pytest.raises(ConfigError, match=said):
        checked(made)


def test_a_prompt_of_a_wrong_type_is_refused_with_its_line(made: Path) -> None:
    good = '{"prompt": "1 + 1 =", "label": "2"}\n'
    (made / "train.jsonl").write_text(good + '{"prompt": 5, "label": "2"}\n')
    with pytest.raises(PromptDataError, match=r"train\.jsonl, line 2: the prompt is 5, expected"):
        checked(made)
    checked(made, "--data.skip_bad_lines=true")
    with pytest.raises(ConfigError, match=r"line 1: the record has no key 'question'"):
        checked(made, "--data.prompt_key=question")
    with pytest.raises(ConfigError, match=r"is a directory; name a \.jsonl or \.parquet file"):
        checked(made, f"--data.train={made}")
