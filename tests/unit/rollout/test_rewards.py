"""Verifiers, where they run, and what happens when they fail."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vime_hpc.config.rollout import RolloutConfig
from vime_hpc.errors import ConfigError
from vime_hpc.rollout.generate import failed_sample
from vime_hpc.rollout.rewards import verifiers
from vime_hpc.rollout.rewards.extract import extract, last_boxed
from vime_hpc.rollout.rewards.runner import Grade, RewardRunner
from vime_hpc.types import GroupRequest, Prompt, Sample, Status

HERE = __name__


def prompt(label: Any = "42", **metadata: Any) -> Prompt:
    return Prompt(0, np.array([1], dtype=np.int32), "p", label, metadata)


def sample(text: str) -> Sample:
    base = failed_sample(GroupRequest(0, prompt(), 1), 0, cause="", version=0)
    return replace(base, status=Status.COMPLETED, response_text=text, seed=5)


def grade(
    text: str, label: Any = "42", *, metadata: Mapping[str, Any] | None = None, **config: Any
) -> Grade:
    runner = RewardRunner(RolloutConfig(**config))
    try:
        return asyncio.run(runner.grade(sample(text), prompt(label, **dict(metadata or {}))))
    finally:
        runner.close()


POLYNOMIAL = "+".join(f"{k}x^{{{k}}}" for k in range(11, 31))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\fbox{12}", "12"),
        (r"\boxed{12", None),
        ("12", None),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (rf"\boxed{{{POLYNOMIAL}}}", POLYNOMIAL),
    ],
)
def test_the_last_box_is_read_with_balanced_braces(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "rule", "expected"),
    [
        ("  7 ", "text", "7"),
        ("a <answer> 7 </answer> b", "tag", "7"),
        ("Answer: $13$", "line", "13"),
        ("so\nAnswer: 13.", "line", "13"),
        ("x", "tag", None),
        ("x", "line", None),
        ("7", "auto", "7"),
        (r"\boxed{3} Answer: 4", "auto", "3"),
    ],
)
def test_extraction_rules(text: str, rule: str, expected: str | None) -> None:
    assert extract(text, rule) == expected


@pytest.mark.parametrize("label", ["13", "1/2", "-4", "(1,2)", "x^2+1", POLYNOMIAL])
@pytest.mark.parametrize(
    ("reward", "form"),
    [
        ("math", r"\boxed{%s}"),
        ("math", r"therefore \fbox{%s}."),
        ("dapo", "Answer: $%s$"),
        ("dapo", "Answer: %s"),
        ("dapo", r"\boxed{%s}"),
    ],
)
def test_labels_in_every_documented_form_get_full_marks(label: str, reward: str, form: str) -> None:
    result = grade(form % label, label, reward=reward)
    assert (result.reward, result.cause) == (1.0, "")
    assert result.details["verdict"]["pred"] == label


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        (r"\boxed{0.5}", "1/2", 1.0),
        (r"\boxed{1+x^2}", "x^2+1", 1.0),
        (r"\boxed{41}", "42", 0.0),
        (r"\boxed{42", "42", 0.0),
        ("42", "42", 0.0),
    ],
)
def test_math_compares_expressions_and_wants_a_box(text: str, label: str, expected: float) -> None:
    assert grade(text, label, reward="math").reward == expected


def _math_42(_: Any = None) -> float:
    return float(verifiers.math(sample(r"\boxed{42.0}"), prompt("42"), {})["score"])


def test_math_works_in_every_kind_of_thread_and_process() -> None:
    results = [_math_42()]
    thread = threading.Thread(target=lambda: results.append(_math_42()))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        results.append(pool.submit(_math_42).result())
    results.append(grade(r"\boxed{42.0}", reward="math").reward or 0.0)
    results.append(grade(r"\boxed{42.0}", reward="math", reward_processes=1).reward or 0.0)
    assert results == [1.0] * 5


@pytest.mark.parametrize("processes", [0, 1])
def test_what_a_verifier_raised_is_its_cause(processes: int) -> None:
    result = grade("no number", reward=f"{HERE}:blocking", reward_processes=processes)
    assert result.reward is None
    assert "ValueError: could not convert" in result.cause


def test_an_error_of_the_verifier_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("signal only works in main thread")

    monkeypatch.setattr("math_verify.parse", broken)
    result = grade(r"\boxed{41}", reward="math")
    assert result.reward is None
    assert "signal only works" in result.cause


def test_reasoning_gym_scores_by_the_stored_entry() -> None:
    entry = {"task": "chain_sum", "entry": {"answer": "3", "metadata": {}}}
    config: dict[str, Any] = {"reward": "reasoning_gym", "metadata": entry}
    assert grade("3", **config).reward == 1.0
    assert grade("so <answer> 3 </answer>", **config).reward == 1.0
    assert grade("+3.0", **config).reward == 1.0
    assert grade("4", **config).reward == 0.0
    assert grade("137", **config).reward == pytest.approx(1 / 3), "the library's part marks"
    assert grade("137", reward_table={"exact": True}, **config).reward == 0.0
    assert grade("3", reward="reasoning_gym").reward is None


def test_exact_f1_and_random() -> None:
    assert grade(" 42 ").reward == 1.0
    assert grade("42.").reward == 0.0
    assert grade("Yes", "yes", reward_table={"ignore_case": True}).reward == 1.0
    assert grade("the cat sat", "a cat", reward="f1").reward == pytest.approx(2 * 0.5 * 1.0 / 1.5)
    assert grade("x", reward="random").reward in (0.0, 1.0)
    assert grade("x", reward="random") == grade("y", reward="random")


def test_a_prompt_without_label_is_no_zero() -> None:
    assert grade("x", None).reward is None


async def two_scores(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> dict[str, float]:
    return {"acc": 1.0, "fmt": 0.0}


def test_a_dict_reward_is_read_through_its_key() -> None:
    assert grade("x", reward=f"{HERE}:two_scores", reward_key="acc").reward == 1.0
    with pytest.raises(ConfigError, match=r"'score' is not in .*\['acc', 'fmt'\]"):
        grade("x", reward=f"{HERE}:two_scores", reward_key="score")
    with pytest.raises(ConfigError, match="reward_key must say"):
        grade("x", reward=f"{HERE}:two_scores")


def blocking(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> float:
    time.sleep(float(sample.response_text))
    return 1.0


@pytest.mark.parametrize("processes", [0, 2])
def test_a_verifier_over_its_limit_is_unusable_and_spoils_no_other(processes: int) -> None:
    runner = RewardRunner(
        RolloutConfig(reward=f"{HERE}:blocking", reward_timeout_s=2.0, reward_processes=processes)
    )

    async def grades() -> list[Grade]:
        both = await asyncio.gather(
            runner.grade(sample("60"), prompt()), runner.grade(sample("1"), prompt())
        )
        return [*both, await runner.grade(sample("0"), prompt())]

    try:
        stuck, beside, after = asyncio.run(grades())
    finally:
        runner.close()
    assert stuck.reward is None
    assert "longer than 2 s" in stuck.cause
    assert (beside.reward, after.reward) == (1.0, 1.0)


def test_waiting_for_a_free_worker_does_not_count_towards_the_limit() -> None:
    runner = RewardRunner(RolloutConfig(reward=f"{HERE}:blocking", reward_timeout_s=1.0))

    async def twelve() -> list[Grade]:
        return list(
            await asyncio.gather(*(runner.grade(sample("0.5"), prompt()) for _ in range(12)))
        )

    try:
        assert [g.reward for g in asyncio.run(twelve())] == [1.0] * 12
    finally:
        runner.close()


def test_a_verifier_that_kills_its_process_is_unusable() -> None:
    runner = RewardRunner(RolloutConfig(reward=f"{HERE}:suicidal", reward_processes=1))
    try:
        result = asyncio.run(runner.grade(sample("x"), prompt()))
    finally:
        runner.close()
    assert result.reward is None
    assert "exit code 1" in result.cause


def suicidal(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> float:
    os._exit(1)


def test_blocking_verifiers_do_not_stop_the_event_loop() -> None:
    runner = RewardRunner(RolloutConfig(reward=f"{HERE}:blocking"))

    async def ticks() -> int:
        task = asyncio.create_task(runner.grade(sample("0.4"), prompt()))
        count = 0
        while not task.done():
            await asyncio.sleep(0.01)
            count += 1
        return count

    try:
        assert asyncio.run(ticks()) > 10
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("value", "cause"),
    [(float("nan"), "returned nan"), ("x", "not a number"), (None, "not a number")],
)
def test_what_is_no_number_is_unusable(
    value: Any, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{HERE}.returns", value, raising=False)
    result = grade("x", reward=f"{HERE}:give_back")
    assert result.reward is None
    assert cause in result.cause


returns: Any = 0.0


async def give_back(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> Any:
    return returns


def test_an_unknown_verifier_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="exact, reasoning_gym, math"):
        RewardRunner(RolloutConfig(reward="maths"))


@pytest.fixture
def reward_server() -> Iterator[str]:
    import json
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        calls = 0

        def do_POST(self) -> None:
            Handler.calls += 1
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps({"score": float(body["response"] == body["label"])}).encode()
            self.send_response(503 if Handler.calls == 1 else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def test_a_remote_verifier_is_asked_again_after_an_error(reward_server: str) -> None:
    assert grade("42", reward="remote", reward_table={"url": reward_server}).reward == 1.0
    assert grade("41", reward="remote", reward_table={"url": reward_server}).reward == 0.0
    refused = grade("42", reward="remote", reward_table={"url": "http://127.0.0.1:9/", "tries": 1})
    assert refused.reward is None
