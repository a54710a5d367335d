"""Failure records: the cause is told, not the ends that followed from it, whichever was noticed first."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.config.load import load_config
from vime_hpc.engine.client import EngineControl, EngineHTTPClient
from vime_hpc.errors import EngineError, PublishGivenUpError, RoleDiedError, VimeError
from vime_hpc.loop import RolloutSide, rollout_loop
from vime_hpc.observe.failure import first_failure, phase_of, tail, write_failure

NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there


def lost_in_control() -> EngineError:
    with pytest.raises(EngineError) as caught:
        asyncio.run(EngineControl(NOBODY, "token", name="engine 0").pause())
    return caught.value


def lost_while_generating() -> EngineError:
    async def ask() -> None:
        async with EngineHTTPClient([NOBODY], "token", max_tries=1) as client:
            await client.sample(prompt_tokens=[1], seed=1, max_tokens=1)

    with pytest.raises(EngineError) as caught:
        asyncio.run(ask())
    return caught.value


def test_an_engines_end_is_the_cause_of_what_others_noticed_before_its_host_did(
    tmp_path: Path,
) -> None:
    noticed: list[VimeError] = [
        lost_in_control(),
        lost_while_generating(),
        PublishGivenUpError("the other side of the bridge gave up: engines: engine 0"),
        RoleDiedError("the job's rendezvous is gone"),
    ]
    for number, error in enumerate(noticed):
        write_failure(tmp_path, f"rollout-{number}", error)
    first = first_failure(tmp_path)
    assert first is not None
    assert first["rank"] == "rollout-0"  # the earliest, as long as nobody knows more
    write_failure(tmp_path, "engine-0", EngineError("engine 0 ended with code -9 while serving"))
    first = first_failure(tmp_path)
    assert first is not None
    assert first["rank"] == "engine-0"


class FailsIn:
    """Every part of a rollout side. One call of it fails, in step 3."""

    next_step = 2

    def __init__(self, call: str) -> None:
        self.call = call

    def reach(self, call: str, step: int) -> None:
        if call == self.call and step == 3:
            raise RuntimeError("told to fail")

    def receive(self, at_least: int) -> int:
        self.reach("receive", at_least)
        return at_least

    def evaluate_if_due(self, version: int, *, last: bool = False) -> None:
        self.reach("evaluate_if_due", version)

    def generate(self, step: int, version: int) -> tuple[list[Any], dict[str, float]]:
        self.reach("generate", step)
        return [], {}

    def state(self) -> dict[str, Any]:
        return {}

    def append(self, step: int, groups: Any, *, resume_state: Any, stats: Any) -> None:
        self.reach("append", step)


@pytest.mark.parametrize("call", ["receive", "evaluate_if_due", "generate", "append"])
def test_the_phase_is_the_step_and_the_call_of_the_loop_that_failed(
    call: str, tmp_path: Path
) -> None:
    parts: Any = FailsIn(call)
    with pytest.raises(RuntimeError) as caught:
        rollout_loop(RolloutSide(5, 0, parts, parts, parts, parts))
    assert phase_of(caught.value) == f"step 3, {call}"
    write_failure(tmp_path, "rollout-0", caught.value, last_lines=["one", "two"])
    record = json.loads((tmp_path / "rollout-0.json").read_text())
    assert (record["phase"], record["last_lines"]) == (f"step 3, {call}", ["one", "two"])


def test_an_error_that_was_never_raised_has_no_phase() -> None:
    assert phase_of(RuntimeError("made, not raised")) == ""


def test_the_tail_of_a_log_is_its_last_lines_however_long_it_is(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    assert tail(log) == []
    log.write_text("".join(f"line {n}\n" for n in range(100_000)))
    assert tail(log, 3) == ["line 99997", "line 99998", "line 99999"]


def test_a_task_that_finds_no_rank_for_itself_is_recorded_too(tmp_path: Path) -> None:
    """Three tasks for a layout of four: the user's error, so code 2, which no restart follows."""
    config = load_config([], ["--model.path=m", "--data.train=t", "--trainer.num_ranks=2"])
    (tmp_path / "config.json").write_text(config.model_dump_json())
    attempt = tmp_path / "attempts" / "7.0"
    (attempt / "logs").mkdir(parents=True)
    (attempt / "logs" / "task-1.log").write_text("module load said this\n")
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    answer = subprocess.run(
        [sys.executable, "-m", "vime_hpc.roles", str(tmp_path)],
        env=os.environ | task | {"SLURM_PROCID": "1", "VIME_ATTEMPT": str(attempt)},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 2, answer.stderr
    record = json.loads((attempt / "failures" / "task-1.json").read_text())
    assert "the job has 3 tasks, the configuration needs 4" in record["message"]
    assert (record["phase"], record["last_lines"]) == ("_context", ["module load said this"])
