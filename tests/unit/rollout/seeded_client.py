"""An engine client whose answers follow from (prompt, seed), and that fails where a test tells it to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

END = 257


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str = "stop"
    routed_experts: Any = None


@dataclass
class SeededClient:
    """Answers one digit and the end token, chosen by the seed; `fault` may raise, wait or answer instead."""

    fault: Callable[[Sequence[int], int], Any] | None = None
    calls: list[tuple[bytes, int]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    cancelled: int = 0

    async def sample(
        self,
        *,
        prompt_tokens: Sequence[int],
        seed: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
    ) -> Answer:
        self.calls.append((bytes(t for t in prompt_tokens if t < 256), seed))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.fault is not None:
                answer = self.fault(prompt_tokens, seed)
                if asyncio.iscoroutine(answer):
                    answer = await answer
                if answer is not None:
                    return answer
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        digit = random.Random(seed).randrange(10)
        return Answer([48 + digit, END], [-2.3, -0.1])
