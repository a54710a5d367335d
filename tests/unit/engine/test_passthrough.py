"""[vllm] and [router]: refused before anything starts, with the nearest name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime_hpc.engine import passthrough
from vime_hpc.engine.passthrough import OWN_VLLM, Option, check_router, check_vllm, to_argv
from vime_hpc.errors import ConfigError

OPTIONS = [
    Option(("max-num-seqs",), "int"), Option(("gpu-memory-utilization",), "float"),
    Option(("enforce-eager", "no-enforce-eager"), "flag"), Option(("kv-cache-dtype",), "", ("auto", "fp8")),
    Option(("model", "model-name"), ""),
]  # fmt: skip


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache as an earlier call would have written it, so vLLM is not imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(passthrough, "vllm_version", lambda: "1.2.3")
    cache = tmp_path / "vime_hpc" / "vllm-options-1.2.3.json"
    cache.parent.mkdir()
    options = json.loads(passthrough.as_json(OPTIONS))
    cache.write_text(json.dumps({"format": passthrough.CACHE_FORMAT, "options": options}))


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"max-num-seq": 4},
            r"\[vllm\] max-num-seq: vLLM 1.2.3 has no option --max-num-seq; the nearest: max-num-seqs",
        ),
        ({"max_num_seqs": "many"}, r"max_num_seqs = 'many': vLLM 1.2.3 takes a whole number"),
        ({"enforce-eager": "yes"}, "takes true or false"),
        ({"kv-cache-dtype": "int3"}, "one of auto, fp8"),
        ({"seed": 1}, r"\[vllm\] seed is set by vime_hpc: it is run.seed"),
        ({"model-name": "x"}, "set by vime_hpc: it is model.path"),
        ({"api_key": "x"}, "set by vime_hpc"),
    ],
)
def test_a_table_vllm_would_not_take_is_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_vllm(table)


@pytest.mark.usefixtures("known")
def test_a_good_table_passes_and_becomes_a_command_line() -> None:
    table = {"max-num-seqs": 64, "enforce_eager": True, "gpu-memory-utilization": 0.8}
    assert check_vllm(table) is True
    assert to_argv(table) == [
        "--max-num-seqs",
        "64",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "0.8",
    ]


def test_false_lists_and_tables_have_their_form_on_the_command_line() -> None:
    assert to_argv({"a": False, "b": ["x", "y"], "c": {"k": 1}}) == [
        "--no-a",
        "--b",
        "x",
        "y",
        "--c",
        '{"k": 1}',
    ]


def test_without_vllm_only_our_own_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passthrough, "vllm_version", lambda: None)
    assert check_vllm({"whatever": 1}) is False
    with pytest.raises(ConfigError, match="set by vime_hpc"):
        check_vllm({next(iter(OWN_VLLM)): 1})


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for the child that imports vLLM; holds one entry a listing."""
    calls: list[str] = []

    def list_options() -> list[dict[str, object]]:
        calls.append("listed")
        found: list[dict[str, object]] = json.loads(passthrough.as_json(OPTIONS))
        return found

    monkeypatch.setattr(passthrough, "_list_in_child", list_options)
    return calls


def test_a_cache_that_cannot_be_written_costs_the_listing_again_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    listed: list[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # root may write to any directory
    assert passthrough.vllm_options("1.2.3") == OPTIONS
    assert [record.getMessage() for record in caplog.records] == [
        f"vLLM's options cannot be kept in {tmp_path}/file/vime_hpc (Not a directory), so every start lists them anew; "
        "XDG_CACHE_HOME names another directory"
    ]
    assert passthrough.vllm_options("1.2.3") == OPTIONS
    assert len(listed) == 2


def test_a_half_written_cache_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "vime_hpc" / "vllm-options-1.2.3.json").mkdir(parents=True)  # cannot be replaced
    assert passthrough.vllm_options("1.2.3") == OPTIONS
    assert [path.name for path in (tmp_path / "vime_hpc").iterdir()] == ["vllm-options-1.2.3.json"]
    assert listed


def test_the_options_are_listed_once_where_the_cache_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not there yet"))
    assert passthrough.vllm_options("1.2.3") == passthrough.vllm_options("1.2.3") == OPTIONS
    assert len(listed) == 1


def test_the_listing_is_announced_before_it_begins_and_the_cache_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    announced: list[str] = []

    def list_options() -> list[object]:
        announced.append(capfd.readouterr().err)
        return []

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(passthrough, "_list_in_child", list_options)
    for _ in range(2):
        passthrough.vllm_options("1.2.3")
    assert announced == ["listing vLLM 1.2.3's options once, about 15 s ...\n"]
    assert capfd.readouterr() == ("", "")


def test_a_user_without_a_home_directory_has_no_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    listed: list[str],
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)  # the password file has no such user
    monkeypatch.chdir(tmp_path)
    assert passthrough.vllm_options("1.2.3") == OPTIONS
    assert "cannot be kept" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert listed


def test_router_options_are_checked_against_the_installed_router() -> None:
    pytest.importorskip("vllm_router")
    assert check_router({"policy": "cache_aware", "cache-threshold": 0.5}) is True
    with pytest.raises(ConfigError, match=r"has no option --polcy; the nearest: policy"):
        check_router({"polcy": "random"})
    with pytest.raises(ConfigError, match=r"one of .*round_robin"):
        check_router({"policy": "fastest"})
    with pytest.raises(ConfigError, match=r"\[router\] api-key is set by vime_hpc"):
        check_router({"api-key": "x"})
