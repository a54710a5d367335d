"""The client against an engine that misbehaves: retries, refusals, forged answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from vime_hpc.engine.client import EngineAnswer, EngineControl, EngineHTTPClient
from vime_hpc.engine.tokens import new_token_file, read_token
from vime_hpc.errors import DeadlineError, EngineError
from vime_hpc.testing.stub_engine import StubEngine, StubKnobs


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return new_token_file(tmp_path / "token")


def run(
    token_file: Path,
    knobs: StubKnobs,
    action: Callable[[EngineHTTPClient], Awaitable[Any]],
    **options: Any,
) -> Any:
    async def main(url: str) -> Any:
        async with EngineHTTPClient([url], read_token(token_file), **options) as client:
            return await action(client)

    with StubEngine(token_file, knobs) as engine:
        return asyncio.run(main(engine.url))


async def one(
    client: EngineHTTPClient, seed: int = 1, prompt: tuple[int, ...] = (1, 2, 3)
) -> EngineAnswer:
    return await client.sample(prompt_tokens=prompt, seed=seed, max_tokens=16)


def test_a_prompt_too_long_is_tried_once_and_fails_with_the_cause(token_file: Path) -> None:
    async def action(client: EngineHTTPClient) -> None:
        answer = await one(client, prompt=(1,) * 9)
        assert (answer.finish_reason, answer.num_tries, answer.tokens) == ("failed", 1, [])
        assert "prompt too long: 9 tokens" in answer.cause
        assert (client.counts["tries"], client.counts["refused"]) == (1, 1)

    run(token_file, StubKnobs(too_long_above=8), action)


def test_503_twice_then_200_is_one_answer_with_three_tries(token_file: Path) -> None:
    async def action(client: EngineHTTPClient) -> None:
        answer = await one(client)
        assert not answer.failed
        assert answer.num_tries == 3
        assert client.counts["retries_http_503"] == 2

    run(token_file, StubKnobs(fail_503=2), action)


def test_an_engine_that_stays_unavailable_is_an_error_after_bounded_tries(token_file: Path) -> None:
    async def action(client: EngineHTTPClient) -> None:
        with pytest.raises(EngineError, match=r"after 2 tries .* HTTP 503: No available workers"):
            await one(client)

    run(token_file, StubKnobs(fail_503=99), action, max_tries=2)


def test_a_nan_logprob_fails_that_answer_alone(token_file: Path) -> None:
    async def action(client: EngineHTTPClient) -> None:
        answers = await asyncio.gather(*(one(client, seed=s) for s in (1, 2, 3, 4)))
        assert [a.failed for a in answers] == [False, False, True, True]
        assert "not finite" in answers[2].cause
        assert client.counts["bad_logprobs"] == 2

    run(token_file, StubKnobs(nan_above_seed=2), action)


def test_a_hanging_engine_ends_in_a_failed_answer_within_the_time_limit(token_file: Path) -> None:
    async def action(client: EngineHTTPClient) -> None:
        answer = await one(client)
        assert answer.failed
        assert "within rollout.request_timeout_s = 1 s" in answer.cause

    run(token_file, StubKnobs(hang_on="/v1/completions"), action, request_timeout_s=1.0)


def test_no_more_requests_are_in_flight_than_the_concurrency_allows(token_file: Path) -> None:
    async def action(client: EngineHTTPClient) -> None:
        tasks = [asyncio.create_task(one(client, seed=s)) for s in range(12)]
        most = 0
        while not all(t.done() for t in tasks):
            most = max(most, sum(client._load.values()))
            await asyncio.sleep(0.001)
        assert most == 3

    run(token_file, StubKnobs(latency_s=0.002), action, concurrency=3)


def test_a_wrong_token_is_an_error_at_once(token_file: Path) -> None:
    async def main(url: str) -> None:
        async with EngineHTTPClient([url], "0" * 64) as client:
            with pytest.raises(EngineError, match="refused our token"):
                await one(client)
            assert client.counts["tries"] == 1

    with StubEngine(token_file) as engine:
        asyncio.run(main(engine.url))


def test_an_answer_without_an_engines_proof_is_refused(token_file: Path) -> None:
    """A stranger's server, in the router's rotation or on a port thought free, cannot feed us samples."""

    async def forge(request: web.Request) -> web.Response:
        body = await request.json()
        choice = {"token_ids": [1], "prompt_token_ids": body["prompt"], "finish_reason": "stop",
                  "logprobs": {"token_logprobs": [-1.0]}}  # fmt: skip
        return web.json_response({"choices": [choice]})

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", forge)
        app.router.add_post("/pause", forge)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        token = read_token(token_file)
        async with EngineHTTPClient([f"http://{host}:{port}"], token) as client:
            with pytest.raises(EngineError, match="proof"):
                await one(client)
        with pytest.raises(EngineError):
            await EngineControl(f"http://{host}:{port}", token).is_paused()
        await runner.cleanup()

    asyncio.run(main())


def test_routed_experts_come_as_one_row_per_token_but_the_last(token_file: Path) -> None:
    async def action(client: EngineHTTPClient) -> None:
        answer = await one(client)
        assert answer.routed_experts is not None
        assert answer.routed_experts.shape == (3 + len(answer.tokens) - 1, 4 * 2)
        assert answer.routed_experts.dtype == np.uint8
        assert answer.routed_experts[2].tolist() == [
            3,
            4,
            4,
            5,
            5,
            6,
            6,
            7,
        ]  # token 3: (token + layer + k) % 8

    run(token_file, StubKnobs(routed_experts=(4, 8, 2)), action)


def test_requests_wait_while_paused_and_abort_returns_what_there_is(token_file: Path) -> None:
    async def main(url: str) -> None:
        control = EngineControl(url, read_token(token_file))
        async with EngineHTTPClient([url], read_token(token_file)) as client:
            flight = asyncio.create_task(client.sample(prompt_tokens=[1], seed=3, max_tokens=400))
            await asyncio.sleep(0.3)
            await control.pause("abort")
            assert (await flight).finish_reason == "abort"
            assert await control.is_paused()
            waiting = asyncio.create_task(one(client))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await control.resume()
            assert not (await waiting).failed

    with StubEngine(token_file, StubKnobs(latency_s=0.01)) as engine:
        asyncio.run(main(engine.url))


def test_control_calls_have_a_deadline_and_name_the_engine(token_file: Path) -> None:
    async def main(url: str) -> None:
        control = EngineControl(url, read_token(token_file), timeout_s=0.5, name="engine 7")
        with pytest.raises(DeadlineError, match="engine 7 did not answer POST /pause within"):
            await control.pause()
        with pytest.raises(EngineError, match="engine 7 refused to reset its prefix cache"):
            await control.reset_prefix_cache()

    with StubEngine(token_file, StubKnobs(hang_on="/pause", refuse_reset=True)) as engine:
        asyncio.run(main(engine.url))
