"""Engines read back on request: through the run directory, after a publish, with the stub engine's worker."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.cli.main import main
from vime_hpc.engine.client import EngineControl
from vime_hpc.engine.tokens import new_token_file, read_token
from vime_hpc.errors import WeightsMismatchError
from vime_hpc.roles.readback import answer_requests
from vime_hpc.testing.stub_engine import StubEngine, StubKnobs
from vime_hpc.weights.readback import ask, wait_answer, wanted

NAMES = {"a": "1", "b": "2"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def after_publish(run: Path, monkeypatch: pytest.MonkeyPatch, *knobs: StubKnobs) -> None:
    """What the leading rollout worker does once a version has arrived."""
    token_file = new_token_file(run / "token")

    async def main() -> None:
        controls = [
            EngineControl(e.url, read_token(token_file), name=f"engine {i}")
            for i, e in enumerate(engines)
        ]
        await answer_requests(run, 7, controls)

    engines = [StubEngine(token_file, k) for k in knobs]
    for engine in engines:
        engine.__enter__()
        monkeypatch.setattr(engine.app.worker, "_digests", lambda: NAMES)
    try:
        asyncio.run(main())
        assert all(e.app.calls == ["collective_rpc:vime_compare"] for e in engines) or not wanted(
            run
        )
    finally:
        for engine in engines:
            engine.__exit__(None, None, None)


def test_what_nobody_asked_for_is_not_asked_of_the_engines(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        await answer_requests(run, 1, [EngineControl("http://127.0.0.1:9", "no one there")])

    asyncio.run(main())


def test_every_engine_rank_is_compared_and_the_asker_gets_the_answer_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ask(run), ask(run)
    assert wanted(run) == sorted([first, second])
    after_publish(run, monkeypatch, StubKnobs(), StubKnobs())
    assert wanted(run) == []
    for number in (first, second):
        found = wait_answer(run, number, 1.0)
        assert found["version"] == 7
        assert found["ranks"] == [
            {"engine": f"engine {i}", "rank": 0, "compared": 2, "different": []} for i in (0, 1)
        ]
    assert list((run / "readback").iterdir()) == []


def test_a_difference_ends_the_run_with_the_tensors_name_and_is_answered_first(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = ask(run)
    with pytest.raises(WeightsMismatchError, match=r"engine 1, rank 0: 1 of 2 .* version 7: b"):
        after_publish(run, monkeypatch, StubKnobs(), StubKnobs(damaged="b"))
    assert wait_answer(run, number, 1.0)["ranks"][1]["different"] == ["b"]


@pytest.mark.parametrize(
    ("knobs", "code", "words"),
    [
        (StubKnobs(), 0, "2 tensors, each bit for bit what was published"),
        (StubKnobs(damaged="a"), 3, "DIFFERENT: a (1 of 2 tensors)"),
    ],
)
def test_the_command_asks_waits_and_says_what_was_found(
    knobs: StubKnobs, code: int, words: str, run: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def job() -> None:
        while not wanted(run):
            stop.wait(0.02)
        try:
            after_publish(run, monkeypatch, knobs)
        except WeightsMismatchError as error:
            ended.append(error)

    stop, ended = threading.Event(), list[Any]()
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    assert main(["weights", "verify", str(run), "--engines", "--wait", "60"]) == code
    thread.join(30)
    assert words in capsys.readouterr().out
    assert len(ended) == (code == 3)


def test_a_job_that_does_not_answer_is_said_and_the_request_taken_back(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", "verify", str(run), "--engines", "--wait", "0.1"]) == 1
    assert "Is it running? vime-hpc status" in capsys.readouterr().err
    assert wanted(run) == []
    assert main(["weights", "verify", str(run / "elsewhere"), "--engines"]) == 2
