"""The probe after a publish: due on both sides alike, and an engine that computes with other weights stops the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vime_hpc.errors import WeightsMismatchError
from vime_hpc.roles.probe import KEY, NUM_TOKENS, PROMPT, ProbedPublisher, is_due
from vime_hpc.types import Sample

TRUE = -np.arange(1, NUM_TOKENS + 1, dtype=np.float32)


def config(*, interval: int = 2, lag: int = 1) -> Any:
    return SimpleNamespace(
        weights=SimpleNamespace(verify_interval=interval, verify_tolerance=0.1),
        rollout=SimpleNamespace(max_weight_lag=lag),
        run=SimpleNamespace(wait_timeout_s=1.0),
    )


class Engines:
    """A rendezvous that already has the engines' answers, and a transport that does nothing."""

    def __init__(self, *offsets: float) -> None:
        self.asked: list[str] = []
        self.epoch = 1
        self.lost: set[str] = set()
        """Probes in which an engine is lost; the next publish goes over a new bridge."""
        self._answers = [
            {
                "prompt": list(PROMPT),
                "tokens": [index] * NUM_TOKENS,
                "logprobs": (TRUE + offset).tolist(),
            }
            for index, offset in enumerate(offsets)
        ]

    def wait(self, key: str, **_: Any) -> Any:
        self.asked.append(key)
        return None if key in self.lost else self._answers

    def publish(self, version: int) -> dict[str, float]:
        self.epoch += bool(self.asked) and self.asked[-1] in self.lost
        return {"weights/nbytes": float(version)}

    def publisher(self, **options: int) -> ProbedPublisher:
        return ProbedPublisher(self, logprobs, config(**options), self)  # type: ignore[arg-type]


def logprobs(samples: list[Sample]) -> list[Any]:
    for index, sample in enumerate(samples):
        assert sample.tokens.tolist() == [*PROMPT, *[index] * NUM_TOKENS]
    return [TRUE] * len(samples)


def test_the_first_version_and_every_interval_th_of_a_lagging_run_are_probed() -> None:
    engines = Engines(0.0)
    publisher = engines.publisher()
    found = [publisher.publish(version) for version in (5, 6, 7, 8)]
    assert engines.asked == [KEY.format(epoch=1, version=v) for v in (5, 6, 8)]
    assert ["weights/probe_logprob_abs_diff" in m for m in found] == [True, True, False, True]
    assert not is_due(config(lag=0), 6, first=False)  # on-policy samples are compared there
    assert is_due(config(lag=0), 5, first=True)
    assert not is_due(config(interval=0), 5, first=True)


def test_a_version_whose_probe_lost_an_engine_is_published_and_probed_again_over_the_next_bridge() -> (
    None
):
    engines = Engines(0.0)
    first, again = (KEY.format(epoch=epoch, version=5) for epoch in (1, 2))
    engines.lost = {first}
    publisher = engines.publisher(lag=0)
    assert "weights/probe_logprob_abs_diff" in publisher.publish(5)
    assert engines.asked == [first, again]
    publisher.publish(6)  # on-policy samples are compared from here on
    assert engines.asked == [first, again]
    engines.epoch = 3  # engines came back while the trainer waited for a batch
    publisher.publish_again()
    assert engines.asked[2:] == [KEY.format(epoch=3, version=6)]


@pytest.mark.parametrize("offset", [0.2, -0.2, float("nan")])
def test_an_engine_with_other_logprobs_is_named_and_stops_the_run(offset: float) -> None:
    with pytest.raises(WeightsMismatchError, match=r"version 3: engine 1's logprobs .* differ"):
        Engines(0.01, offset).publisher().publish(3)
    assert Engines(0.01, 0.05).publisher().publish(3)["weights/probe_logprob_abs_diff"] > 0.04
