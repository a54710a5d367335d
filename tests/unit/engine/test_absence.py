"""A request that came to nothing is worth another try once an engine that was away is in service again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from vime_hpc.engine.absence import EngineAbsence
from vime_hpc.engine.client import EngineControl, EngineHTTPClient
from vime_hpc.engine.supervised import free_port
from vime_hpc.engine.tokens import HOLD_ENV, new_token_file, read_token
from vime_hpc.errors import EngineError, EngineLostError
from vime_hpc.testing.stub_engine import StubEngine

BAD = EngineError("HTTP 500")


def test_while_every_engine_serves_an_error_is_the_requests_own_and_a_lost_connection_is_not(
    tmp_path: Path,
) -> None:
    token_file = new_token_file(tmp_path / "token")
    with StubEngine(token_file) as engine:

        async def main() -> list[bool]:
            absence = EngineAbsence([engine.url], read_token(token_file), 60.0)
            return [await absence.is_over(BAD), await absence.is_over(EngineLostError("reset"))]

        assert asyncio.run(main()) == [False, True]


def test_an_engine_that_was_started_again_is_waited_for_until_its_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file = new_token_file(tmp_path / "token")
    token = read_token(token_file)
    monkeypatch.setenv(HOLD_ENV, "1")
    with StubEngine(token_file) as engine:
        monkeypatch.delenv(HOLD_ENV)

        async def main() -> None:
            absence = EngineAbsence([engine.url], token, 60.0)
            waiting = [asyncio.create_task(absence.is_over(BAD)) for _ in range(20)]
            async with EngineHTTPClient([engine.url], token, max_tries=1) as client:
                with pytest.raises(EngineError, match="has no weights yet"):
                    await client.sample(prompt_tokens=[1], seed=1, max_tokens=4)
                assert not any(task.done() for task in waiting)
                await EngineControl(engine.url, token).resume()
                assert await asyncio.gather(*waiting) == [True] * 20
                assert (await client.sample(prompt_tokens=[1], seed=1, max_tokens=4)).tokens

        asyncio.run(main())


def test_an_engine_that_does_not_come_back_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    token = read_token(new_token_file(tmp_path / "token"))

    async def main() -> bool:
        absence = EngineAbsence([f"http://127.0.0.1:{free_port('127.0.0.1')}"], token, 1.0)
        return await absence.is_over(EngineLostError("refused"))

    start = time.monotonic()
    assert asyncio.run(main()) is False
    assert time.monotonic() - start >= 1.0
