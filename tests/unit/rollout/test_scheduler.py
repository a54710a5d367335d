"""The life of a step's rollouts: order, retries, over-sampling, faults that must not become rewards."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from seeded_client import END, Answer, SeededClient

from vime_hpc.errors import ConfigError, EngineError, EngineLostError, VimeError
from vime_hpc.rollout.generate import SampleBuilder
from vime_hpc.rollout.scheduler import DROP_LIMIT, RolloutScheduler
from vime_hpc.rollout.source import PromptSource
from vime_hpc.types import GroupRequest, Prompt, PromptGroup, Sample, Status

Make = Callable[..., RolloutScheduler]
HERE = __name__


def ids(groups: Sequence[PromptGroup]) -> list[int]:
    return [group.group_id for group in groups]


def content(groups: Sequence[PromptGroup]) -> list[Any]:
    return [
        (s.sample_id, s.tokens.tolist(), s.rollout_logprobs.tolist(), s.reward, s.seed)
        for g in groups
        for s in g.samples
    ]


def test_steps_use_every_prompt_once_in_order(make_scheduler: Make) -> None:
    scheduler = make_scheduler(SeededClient())
    batches = [scheduler.generate(step, step)[0] for step in range(4)]
    assert [ids(b) for b in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [g.prompt_id for b in batches for g in b] == list(range(8))


def test_same_seed_gives_the_same_step_whatever_the_timing(make_scheduler: Make) -> None:
    async def slow(first: bool) -> None:
        await asyncio.sleep(0.05 if first else 0.0)

    plain = make_scheduler(SeededClient()).generate(0, 0)[0]
    late = make_scheduler(
        SeededClient(fault=lambda p, s: slow(b"p0" in bytes(t for t in p if t < 256)))
    ).generate(0, 0)[0]
    assert content(plain) == content(late)
    assert content(plain) != content(make_scheduler(SeededClient()).generate(1, 1)[0])


def test_samples_carry_what_the_engine_said(make_scheduler: Make) -> None:
    sample = make_scheduler(SeededClient()).generate(3, 3)[0][0].samples[0]
    assert sample.tokens[-1] == END
    assert sample.response_length == 2
    assert sample.prompt_length == len(sample.tokens) - 2
    assert sample.loss_mask.tolist() == [1, 1]
    assert sample.rollout_logprobs.tolist() == pytest.approx([-2.3, -0.1])
    assert (sample.status, sample.finish_reason) == (Status.COMPLETED, "stop")
    assert sample.response_text == chr(sample.tokens[-2])
    assert [(v.version, v.start) for v in sample.versions] == [(3, 0)]


def test_requests_in_flight_stay_under_the_limit(make_scheduler: Make) -> None:
    client = SeededClient()
    make_scheduler(client, prompts_per_step=8, group_size=4, concurrency=3).generate(0, 0)
    assert client.most_in_flight == 3
    assert len(client.calls) == 32


def test_every_rollout_and_every_try_has_its_own_seed(make_scheduler: Make) -> None:
    failed: set[int] = set()

    def first_two(prompt: Sequence[int], seed: int) -> None:
        if len(failed) < 2:
            failed.add(seed)
            raise EngineError("no")

    client = SeededClient(fault=first_two)
    groups, metrics = make_scheduler(client, group_size=4).generate(0, 0)
    seeds = [seed for _, seed in client.calls]
    assert len(seeds) == len(set(seeds)) == 10
    assert metrics["rollout/failed_retries"] == 2
    assert sorted(s.attempt for g in groups for s in g.samples) == [0] * 6 + [1] * 2
    assert not failed & {s.seed for g in groups for s in g.samples}


def test_requests_of_a_lost_engine_are_handed_out_again_with_their_seeds_and_counted_once(
    make_scheduler: Make,
) -> None:
    lost: set[int] = set()
    returned = 0

    def first_four(prompt: Sequence[int], seed: int) -> None:
        if len(lost) < 4 and seed not in lost:
            lost.add(seed)
            raise EngineLostError("connection refused")

    async def ask_again(error: EngineError) -> bool:
        nonlocal returned
        await asyncio.sleep(0.01)  # the engine comes back
        returned += isinstance(error, EngineLostError)
        return True

    plain, _ = make_scheduler(SeededClient(), group_size=4).generate(0, 0)
    client = SeededClient(fault=first_four)
    scheduler = make_scheduler(client, group_size=4, hooks={"ask_again": ask_again})
    groups, metrics = scheduler.generate(0, 0)
    assert content(groups) == content(plain)
    assert (len(client.calls), returned) == (12, 4)
    assert metrics["rollout/requests_handed_out_again"] == 4
    assert "rollout/failed_retries" not in metrics
    assert {s.attempt for g in groups for s in g.samples} == {0}
    assert "rollout/requests_handed_out_again" not in scheduler.generate(1, 1)[1]


def test_an_engine_that_never_comes_back_costs_a_try(make_scheduler: Make) -> None:
    def one(prompt: Sequence[int], seed: int) -> None:
        if len(client.calls) == 1:
            raise EngineLostError("connection refused")

    async def gone(error: EngineError) -> bool:
        return False

    client = SeededClient(fault=one)
    groups, metrics = make_scheduler(client, hooks={"ask_again": gone}).generate(0, 0)
    assert metrics["rollout/failed_retries"] == 1
    assert sorted(s.attempt for g in groups for s in g.samples) == [0, 0, 0, 1]


async def raise_on_two(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> float:
    if sample.index_in_group == 2:
        raise ConnectionError("sandbox is gone")
    return float(sample.index_in_group % 2)


def test_a_verifier_that_fails_gives_no_reward_and_is_counted(make_scheduler: Make) -> None:
    scheduler = make_scheduler(
        SeededClient(),
        prompts_per_step=1,
        group_size=4,
        reward=f"{HERE}:raise_on_two",
        max_failed_share=0.5,
    )
    groups, metrics = scheduler.generate(0, 0)
    rewards = [s.reward for s in groups[0].samples]
    assert rewards == [0.0, 1.0, None, 1.0]
    assert groups[0].samples[2].status is Status.FAILED
    assert "ConnectionError: sandbox is gone" in groups[0].samples[2].reward_cause
    assert metrics["rollout/raw_reward"] == pytest.approx(2 / 3)
    assert metrics["rollout/unusable_share"] == 0.25


def test_too_many_unusable_rollouts_stop_the_run_with_their_count_and_cause(
    make_scheduler: Make,
) -> None:
    scheduler = make_scheduler(
        SeededClient(),
        prompts_per_step=1,
        group_size=4,
        reward=f"{HERE}:raise_on_two",
        max_failed_share=0.2,
    )
    with pytest.raises(
        VimeError, match=r"1/4 rollouts are unusable.*max_failed_share = 0.2.*sandbox is gone"
    ):
        scheduler.generate(0, 0)


def test_a_rollout_that_keeps_failing_is_failed_not_zero(make_scheduler: Make) -> None:
    def fault(prompt: Sequence[int], seed: int) -> None:
        if b"p1" in bytes(t for t in prompt if t < 256):
            raise EngineError("HTTP 503")

    groups, metrics = make_scheduler(
        SeededClient(fault=fault), max_failed_share=0.5, max_attempts=2
    ).generate(0, 0)
    bad = groups[1].samples
    assert [(s.status, s.reward, s.response_length) for s in bad] == [(Status.FAILED, None, 0)] * 2
    assert "HTTP 503" in bad[0].reward_cause
    assert metrics["rollout/failed"] == 2
    assert all(s.reward is not None for s in groups[0].samples)


def test_a_request_over_its_time_limit_is_tried_again_and_then_failed(make_scheduler: Make) -> None:
    client = SeededClient(fault=lambda p, s: asyncio.sleep(60))
    scheduler = make_scheduler(client, request_timeout_s=0.05, max_attempts=2, max_failed_share=1.0)
    groups, _ = scheduler.generate(0, 0)
    assert "request_timeout_s" in groups[0].samples[0].reward_cause
    assert client.cancelled == 8


def test_a_logprob_that_is_no_number_makes_the_sample_failed_and_keeps_it(
    make_scheduler: Make,
) -> None:
    def fault(prompt: Sequence[int], seed: int) -> Answer | None:
        broken = b"p0" in bytes(t for t in prompt if t < 256)
        return Answer([48, 49, END], [-0.1, math.nan, -math.inf]) if broken else None

    groups, _ = make_scheduler(SeededClient(fault=fault), max_failed_share=0.5).generate(0, 0)
    sample = groups[0].samples[0]
    assert (sample.status, sample.reward) == (Status.FAILED, None)
    assert "2 logprobs are not finite" in sample.reward_cause
    assert sample.tokens[-3:].tolist() == [48, 49, END]
    assert sample.loss_mask.tolist() == [0, 0, 0]
    assert sample.metadata["bad_logprobs"] == {"1": "nan", "2": "-inf"}


@pytest.mark.parametrize("broken", [1, 5])
def test_broken_logprobs_are_left_out_until_their_share_stops_the_run(
    broken: int, make_scheduler: Make
) -> None:
    """Case C25: one of eight goes on without it, five of eight stop."""
    answered: list[int] = []

    def fault(prompt: Sequence[int], seed: int) -> Answer:
        answered.append(seed)
        first = math.nan if len(answered) <= broken else -0.1
        return Answer([48, 49, END], [first, -0.1, -0.2])

    options = {"prompts_per_step": 4, "max_failed_share": 0.5, "max_attempts": 1}
    scheduler = make_scheduler(SeededClient(fault=fault), **options)
    if broken == 5:
        with pytest.raises(VimeError, match=r"5/8 rollouts are unusable.*max_failed_share = 0.5"):
            scheduler.generate(0, 0)
        return
    groups, metrics = scheduler.generate(0, 0)
    assert metrics["rollout/unusable_share"] == 0.125
    trained = [int(s.loss_mask.sum()) for group in groups for s in group.samples]
    assert sorted(trained) == [0] + [3] * 7


def test_an_aborted_rollout_is_made_again_from_the_start_under_new_weights(
    make_scheduler: Make,
) -> None:
    version = [2]
    stopped: list[int] = []

    def fault(prompt: Sequence[int], seed: int) -> Answer | None:
        if len(stopped) < 4:
            stopped.append(seed)
            version[0] = 3
            return Answer([48], [-1.0], "abort")
        return None

    scheduler = make_scheduler(SeededClient(fault=fault), hooks={"version_now": lambda: version[0]})
    groups, metrics = scheduler.generate(2, 2)
    samples = [s for g in groups for s in g.samples]
    assert all(s.status is Status.COMPLETED and s.response_length == 2 for s in samples)
    assert {v.version for s in samples for v in s.versions} == {3}
    assert metrics["rollout/aborted_retries"] == 4


def test_filters_drop_groups_and_the_batch_is_the_first_that_pass(make_scheduler: Make) -> None:
    dropped: list[tuple[int, int]] = []
    scheduler = make_scheduler(
        SeededClient(),
        prompts_per_step=3,
        filters=[f"{HERE}:drop_even"],
        hooks={"on_group_dropped": lambda step, group: dropped.append((step, group))},
    )
    groups, metrics = scheduler.generate(0, 0)
    assert ids(groups) == [1, 3, 5]
    assert metrics["rollout/dynamic_filter/drop_even"] == 3
    assert dropped == [(0, 0), (0, 2), (0, 4)]
    assert scheduler.state()["next_group_id"] == 6


async def second_prompt_is_last(prompt: Sequence[int]) -> None:
    """A fault of SeededClient: the group of prompt 1 is the slowest."""
    await asyncio.sleep(0.1 if b"p1" in bytes(t for t in prompt if t < 256) else 0.0)


def test_a_dropped_group_is_counted_by_the_one_step_that_goes_past_it(make_scheduler: Make) -> None:
    # group 1 is the slowest, so group 4 is dropped before the batch [1, 3] is complete
    scheduler = make_scheduler(
        SeededClient(fault=lambda p, s: second_prompt_is_last(p)),
        over_sampling=2.0,
        max_weight_lag=1,
        filters=[f"{HERE}:drop_even"],
    )
    for step, batch in enumerate([[1, 3], [5, 7]]):
        groups, metrics = scheduler.generate(step, step)
        assert ids(groups) == batch
        assert metrics["rollout/dynamic_filter/drop_even"] == 2


def drop_even(group: PromptGroup, table: Mapping[str, Any]) -> str | None:
    return "even" if group.group_id % 2 == 0 else None


def drop_all(group: PromptGroup, table: Mapping[str, Any]) -> str | None:
    return "all"


def test_filters_that_drop_everything_do_not_run_for_ever(make_scheduler: Make) -> None:
    client = SeededClient()
    groups, metrics = make_scheduler(client, filters=[f"{HERE}:drop_all"]).generate(0, 0)
    assert ids(groups) == [0, 1]
    assert metrics["rollout/dynamic_filter/kept_insufficient"] == 2
    assert len(client.calls) <= 2 * (DROP_LIMIT * 2 + 2)


def test_surplus_finished_groups_are_used_by_the_next_step(make_scheduler: Make) -> None:
    # group 1 is the slowest, so groups 2 and 3 are finished when the batch [0, 1] is complete
    client = SeededClient(fault=lambda p, s: second_prompt_is_last(p))
    scheduler = make_scheduler(client, over_sampling=2.0, max_weight_lag=1)
    first, metrics = scheduler.generate(0, 0)
    assert ids(first) == [0, 1]
    assert metrics["rollout/groups_surplus"] == 2
    assert scheduler.state()["next_group_id"] == 2
    calls = len(client.calls)
    second, metrics = scheduler.generate(1, 1)
    assert ids(second) == [2, 3]
    assert metrics["rollout/groups_reused"] == 2
    assert metrics["staleness/max"] == 1
    assert not any(prompt in (b"p2", b"p3") for prompt, _ in client.calls[calls:])


def test_surplus_of_older_weights_is_made_again_where_the_lag_forbids_it(
    make_scheduler: Make,
) -> None:
    scheduler = make_scheduler(
        SeededClient(fault=lambda p, s: second_prompt_is_last(p)),
        over_sampling=2.0,
        max_weight_lag=0,
    )
    scheduler.generate(0, 0)
    second, metrics = scheduler.generate(1, 1)
    assert ids(second) == [2, 3]
    assert metrics["rollout/surplus_too_old"] == 2
    assert metrics["staleness/max"] == 0


async def slow_judge(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> float:
    if prompt.prompt_id >= 2:
        await asyncio.sleep(60)
    return 1.0


def test_surplus_rewards_are_cancelled_not_awaited(make_scheduler: Make) -> None:
    scheduler = make_scheduler(
        SeededClient(), over_sampling=2.0, reward=f"{HERE}:slow_judge", reward_timeout_s=120.0
    )
    started = time.monotonic()
    groups, _ = scheduler.generate(0, 0)
    assert ids(groups) == [0, 1]
    assert time.monotonic() - started < 30  # the judge sleeps for 60


def test_surplus_requests_are_stopped_in_the_engine(make_scheduler: Make) -> None:
    async def hang(prompt: Sequence[int]) -> None:
        await asyncio.sleep(60 if b"p3" in bytes(t for t in prompt if t < 256) else 0)

    client = SeededClient(fault=lambda p, s: hang(p))
    make_scheduler(client, over_sampling=2.0).generate(0, 0)
    assert client.cancelled == 2
    assert client.in_flight == 0


def test_a_crash_loses_no_prompt_and_repeats_none(
    make_scheduler: Make, make_source: Callable[..., PromptSource]
) -> None:
    """Case C51."""
    journal: list[PromptGroup] = []

    before = make_scheduler(
        SeededClient(fault=lambda p, s: second_prompt_is_last(p)),
        over_sampling=2.0,
        max_weight_lag=1,
        hooks={"on_group_done": lambda step, group: journal.append(group)},
    )
    trained = ids(before.generate(0, 0)[0])
    state = before.state()
    # killed here: only the committed state and the journal survive
    client = SeededClient()
    source = make_source()
    source.restore(state)
    after = make_scheduler(client, source=source, max_weight_lag=1, hooks={"recovered": journal})
    for step in (1, 2, 3):
        trained += ids(after.generate(step, step)[0])
    assert trained == list(range(8))
    assert not any(prompt in (b"p2", b"p3") for prompt, _ in client.calls), (
        "finished groups come from the journal"
    )


async def two_turns(
    request: GroupRequest, index: int, client: Any, table: Mapping[str, Any]
) -> list[Sample]:
    builder = SampleBuilder(request, index)
    builder.add_turn(await client.sample(builder.tokens))
    builder.add_context([91, 93])
    builder.add_turn(await client.sample(builder.tokens))
    return [builder.build(client)]


def test_a_two_turn_rollout_keeps_sampled_ids_and_masks_the_tool(make_scheduler: Make) -> None:
    """Case C27: nothing is decoded and encoded again between turns."""
    client = SeededClient(fault=lambda p, s: Answer([1, 2], [-0.5, -0.25]))
    sample = make_scheduler(client, generate=f"{HERE}:two_turns").generate(0, 0)[0][0].samples[0]
    assert sample.tokens[-6:].tolist() == [1, 2, 91, 93, 1, 2]
    assert sample.loss_mask.tolist() == [1, 1, 0, 0, 1, 1]
    assert sample.rollout_logprobs.tolist() == [-0.5, -0.25, 0, 0, -0.5, -0.25]
    assert client.calls[0][1] != client.calls[1][1], "every turn has its own seed"


async def split(
    request: GroupRequest, index: int, client: Any, table: Mapping[str, Any]
) -> list[Sample]:
    samples = []
    for segment in range(2):
        builder = SampleBuilder(request, index, segment)
        builder.add_turn(await client.sample(builder.tokens))
        samples.append(builder.build(client))
    return samples


def test_samples_of_a_split_rollout_share_id_and_reward(make_scheduler: Make) -> None:
    groups, metrics = make_scheduler(SeededClient(), generate=f"{HERE}:split").generate(0, 0)
    samples = groups[0].samples
    assert [s.rollout_id for s in samples] == [0, 0, 1, 1]
    assert [s.sample_id for s in samples] == [0, 1, 100, 101]
    assert samples[0].reward == samples[1].reward
    assert metrics["rollout/num_samples"] == 8


def test_a_split_rollout_with_one_aborted_sample_is_made_again(make_scheduler: Make) -> None:
    count = [0]

    def second_call_aborts(prompt: Sequence[int], seed: int) -> Answer | None:
        count[0] += 1
        return Answer([48], [-1.0], "abort") if count[0] == 2 else None

    scheduler = make_scheduler(
        SeededClient(fault=second_call_aborts), generate=f"{HERE}:split", concurrency=1
    )
    groups, metrics = scheduler.generate(0, 0)
    assert metrics["rollout/aborted_retries"] == 1
    assert all(s.status is Status.COMPLETED for g in groups for s in g.samples)


async def wrong_lengths(
    request: GroupRequest, index: int, client: Any, table: Mapping[str, Any]
) -> list[Sample]:
    from dataclasses import replace

    sample = (await split(request, index, client, table))[0]
    return [replace(sample, loss_mask=sample.loss_mask[:1])]


def test_columns_that_disagree_are_named_in_the_cause(make_scheduler: Make) -> None:
    with pytest.raises(VimeError, match="length of loss_mask is 1, expected 2"):
        make_scheduler(SeededClient(), generate=f"{HERE}:wrong_lengths").generate(0, 0)


def test_unknown_functions_are_refused_before_anything_is_generated(make_scheduler: Make) -> None:
    with pytest.raises(ConfigError, match="zero_spread"):
        make_scheduler(SeededClient(), filters=["zero_std"])
    with pytest.raises(ConfigError, match="no module nowhere"):
        make_scheduler(SeededClient(), generate="nowhere:f")
    with pytest.raises(ConfigError, match="has no missing"):
        make_scheduler(SeededClient(), generate=f"{HERE}:missing")
