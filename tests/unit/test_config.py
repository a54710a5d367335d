"""Configuration: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from vime_hpc.config.load import build_config, load_config, parse_override, read_resolved
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError

NEEDED = ["--model.path=m", "--data.train=t.jsonl"]
REPOSITORY = Path(__file__).parents[2]


def test_files_merge_left_to_right_and_overrides_win(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('[trainer]\ntp = 2\nnum_ranks = 4\n[model]\npath = "m"\n[data]\ntrain = "t"\n')
    second.write_text("[trainer]\ntp = 4\n")
    config = load_config([first, second], ["--trainer.num_ranks=8"])
    assert (config.trainer.tp, config.trainer.num_ranks, config.model.path) == (4, 8, "m")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--trainer.tpp=2", "trainer.tpp is no option .*did you mean trainer.tp?"),
        ("--weights.transprot=disk", "did you mean weights.transport?"),
        ("--trianer.tp=2", "trianer is no section .*did you mean trainer?"),
        ("--trainer.tp=two", "trainer.tp = 'two': expected a valid integer"),
        ("--trainer.tp=2.5", "trainer.tp = 2.5: expected a valid integer"),
        ("--weights.transport=rdma", "expected 'bridge', 'disk', 'delta' or 'ipc'"),
        ("--run.num_steps=0", "expected greater than 0"),
        ("--trainer.tp", "after an equals sign"),
        ("--num_steps=3", "did you mean --run.num_steps?"),
        ("--engine.sleep_level=3", "expected 0, 1 or 2"),
        (
            "--cluster.components.trainer.node=2",
            r"did you mean cluster\.components\.trainer\.nodes\?",
        ),
        ("--cluster.slurm.acount=x", r"did you mean account\? One that your Slurm has"),
        ("--cluster.slurm.zzz=x", r"zzz is no sbatch option\. One that your Slurm has"),
        ("--rollout.filters=zero_spread", r"""expected a list, as in '\["one", "two"\]'"""),
        ("--run.share_with_group=yes", r"expected true or false \(set on the command line\)"),
        (
            "--model.path=~no_such_user/x",
            r"model\.path: ~no_such_user/x begins with .* not known here",
        ),
        ("trainer.tp=2", "neither a configuration file nor an override"),
    ],
)
def test_a_wrong_override_is_told_by_name(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], [*NEEDED, override])


def test_text_options_of_a_component_take_the_bare_word() -> None:
    """As those of a section do: a partition may be called 7, and mem = "0" means all of it."""
    given = ["--cluster.components.trainer.partition=7", "--cluster.components.trainer.mem=0"]
    trainer = load_config([], [*NEEDED, *given]).cluster.components["trainer"]
    assert (trainer.partition, trainer.mem) == ("7", "0")


def test_the_message_names_the_file_a_wrong_value_stands_in(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('[optimizer]\nlr = "high"\n')
    with pytest.raises(ConfigError, match=r"optimizer.lr = 'high'.*bad.toml"):
        load_config([file], NEEDED)


def test_a_missing_required_option_is_named_with_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"model.path is required.*--model.path=VALUE"):
        load_config([], ["--data.train=t"])


def test_a_missing_file_and_a_broken_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config([tmp_path / "none.toml"])
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config([broken])


def test_a_run_of_an_earlier_version_can_be_read(tmp_path: Path) -> None:
    """Its options that are gone do nothing; a wrong value is still refused."""
    tree = load_config([], [*NEEDED, "--cluster.components.trainer.nodes=2"]).model_dump(
        mode="json"
    )
    tree["engine"]["health_interval_s"] = 2.0
    tree["cluster"]["components"]["trainer"]["gone"] = 1
    tree["gone"] = {"too": 1}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tree))
    assert read_resolved(file).cluster.components["trainer"].nodes == 2
    file.write_text(json.dumps({**tree, "run": {"num_steps": 0}}))
    with pytest.raises(ConfigError, match="expected greater than 0"):
        read_resolved(file)


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bash leaves the ~ of --run.dir=~/x alone: the run would lie in a directory of that name."""
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "paths.toml"
    file.write_text('[model]\npath = "~/m"\n[data]\ntrain = "~/t.jsonl"\n')
    config = load_config([file], ["--run.dir=~/runs/a", "--data.eval=/x/~/$e.jsonl"])
    assert (config.model.path, config.run.dir) == ("/home/me/m", "/home/me/runs/a")
    assert (config.data.train, config.data.eval) == ("/home/me/t.jsonl", "/x/~/$e.jsonl")


def test_a_table_replaced_on_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    file.write_text("[rollout]\nreward_table = { a = 1 }\n")
    with pytest.raises(ConfigError, match=r"expected a table.*set on the command line"):
        load_config([file], [*NEEDED, "--rollout.reward_table=0.1"])


def test_a_contradiction_names_where_each_of_its_options_was_set(tmp_path: Path) -> None:
    """And no option that it is not about."""
    file = tmp_path / "three.toml"
    file.write_text("[trainer]\nnum_ranks = 3\n[run]\nseed = 5\n")
    with pytest.raises(ConfigError) as caught:
        load_config([file], [*NEEDED, "--trainer.tp=2", "--run.dir=somewhere"])
    assert str(caught.value).endswith(f"(trainer.num_ranks is set in {file})")
    with pytest.raises(ConfigError) as caught:
        load_config([], [*NEEDED, "--rollout.group_size=1"])
    assert str(caught.value).endswith("(rollout.group_size is set on the command line)")


def test_vllm_and_router_flags_are_kept_for_those_programs() -> None:
    config = load_config(
        [], [*NEEDED, "--vllm-max-num-seqs=64", "--vllm-enforce-eager", "--router-policy=random"]
    )
    assert config.vllm == {"max-num-seqs": 64, "enforce-eager": True}
    assert config.router == {"policy": "random"}


def test_text_options_take_the_raw_word() -> None:
    assert parse_override("--run.dir=7") == (("run", "dir"), "7")
    assert parse_override("--optimizer.lr=1e-3") == (("optimizer", "lr"), 1e-3)
    assert parse_override("--rollout.filters=['zero_spread']")[1] == ["zero_spread"]


def test_a_layout_that_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"num_ranks = 3 is not a multiple of .* = 2 \* 1 \* 1"):
        load_config([], [*NEEDED, "--trainer.num_ranks=3", "--trainer.tp=2"])


@pytest.mark.parametrize(
    "busy", ["--rollout.max_weight_lag=1", "--rollout.num_workers=2", "--run.mode=rollout_only"]
)
def test_engines_that_generate_while_a_step_is_trained_may_not_sleep(busy: str) -> None:
    assert load_config([], [*NEEDED, "--engine.sleep_level=2"]).engine.sleep_level == 2
    with pytest.raises(ConfigError, match=r"sleep_level = 1 needs engines that have nothing"):
        load_config([], [*NEEDED, "--engine.sleep_level=1", busy])


def test_a_configuration_does_not_change_after_loading() -> None:
    config = load_config([], NEEDED)
    with pytest.raises(Exception, match="frozen"):
        config.trainer.tp = 2  # type: ignore[misc]


def test_the_resolved_tree_reads_back_as_the_same_configuration() -> None:
    config = load_config([], [*NEEDED, "--optimizer.lr=3", "--rollout.group_size=4"])
    assert build_config(config.model_dump(mode="json")) == config


def test_every_option_is_documented() -> None:
    undocumented = [
        f"{name}.{option}"
        for name, section in RunConfig.model_fields.items()
        if hasattr(section.annotation, "model_fields")
        for option, field in section.annotation.model_fields.items()
        if not field.description
    ]
    assert not undocumented


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").rglob("*.toml")), ids=str)
def test_every_shipped_toml_file_names_only_real_options(path: Path) -> None:
    tree = tomllib.loads(path.read_text())
    tree.setdefault("model", {}).setdefault("path", "m")
    tree.setdefault("data", {}).setdefault("train", "t")
    build_config(tree)


@pytest.mark.parametrize(
    ("reward", "table"), [("mine:f", {"a": 1, "b": 3, "c": 4}), ("other:f", {"b": 3, "c": 4})]
)
def test_a_later_file_that_names_another_function_drops_the_earlier_ones_table(
    tmp_path: Path, reward: str, table: dict[str, int]
) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text('[rollout]\nreward = "mine:f"\nreward_table = { a = 1, b = 2 }\n')
    second.write_text(f'[rollout]\nreward_table = {{ b = 3, c = 4 }}\nreward = "{reward}"\n')
    config = load_config([first, second], ["--model.path=m", "--data.train=t"])
    assert config.rollout.reward_table == table
