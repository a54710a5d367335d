"""Whether a request came to nothing because an engine is away, and when it is back."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence

import aiohttp

from vime_hpc.engine.tokens import HELD_ROUTE, generate_token
from vime_hpc.errors import EngineError, EngineLostError

log = logging.getLogger(__name__)
POLL_S = 0.5
ANSWER_S = 10.0
"""A busy engine answers late; away is one that nobody listens for, or that is held."""


class EngineAbsence:
    """Tells an engine that ended, or was started again and has no weights yet, from one that answers badly.

    Args:
        urls: the engines themselves, not the router.
        token: the run's token; only the capability derived from it is sent.
        timeout_s: longest absence.
    """

    def __init__(self, urls: Sequence[str], token: str, timeout_s: float) -> None:
        self._urls, self._timeout_s = list(urls), timeout_s
        self._headers = {"Authorization": f"Bearer {generate_token(token)}"}
        self._looking = asyncio.Lock()
        self._looked_at = -1.0
        self._away: list[str] = []

    async def is_over(self, error: EngineError) -> bool:
        """Wait until every engine is in service; True when the request is worth another try, with the same seed.

        Args:
            error: what the request came to.
        """
        end = time.monotonic() + self._timeout_s
        was_away = isinstance(error, EngineLostError)
        while away := await self._who_is_away():
            if time.monotonic() > end:
                log.error("%s did not come back within %g s", ", ".join(away), self._timeout_s)
                return False
            was_away = True
            await asyncio.sleep(POLL_S)
        return was_away

    async def _who_is_away(self) -> list[str]:
        async with self._looking:  # hundreds of requests want to know, one looks
            if time.monotonic() - self._looked_at > POLL_S / 2:
                async with aiohttp.ClientSession(
                    headers=self._headers,
                    timeout=aiohttp.ClientTimeout(total=ANSWER_S),
                    trust_env=False,
                ) as session:
                    found = await asyncio.gather(*(_is_away(session, u) for u in self._urls))
                self._away = [u for u, away in zip(self._urls, found, strict=True) if away]
                self._looked_at = time.monotonic()
            return self._away


async def _is_away(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url + HELD_ROUTE) as answer:
            return answer.status == 200 and bool(json.loads(await answer.read())["held"])
    except TimeoutError:
        return False
    except aiohttp.ClientError:
        return True
