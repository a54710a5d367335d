"""Failure records: the cause is told, not the ends that followed from it, whichever was noticed first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from vime_hpc.engine.client import EngineControl, EngineHTTPClient
from vime_hpc.errors import EngineError, PublishGivenUpError, RoleDiedError, VimeError
from vime_hpc.observe.failure import first_failure, write_failure

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
