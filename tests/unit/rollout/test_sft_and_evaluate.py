"""The supervised warm-up writes labels down; the evaluator grades held-out prompts and keeps its results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeded_client import END, Answer, SeededClient

from vime_hpc.config.data import DataConfig
from vime_hpc.config.rollout import EvalConfig, RolloutConfig
from vime_hpc.errors import EngineError, PromptDataError, VimeError
from vime_hpc.rollout.evaluate import EngineEvaluator, EvalOptions
from vime_hpc.rollout.event_loop import BackgroundLoop
from vime_hpc.rollout.rewards.runner import RewardRunner
from vime_hpc.rollout.sft import SftGenerator, end_of_turn, label_tokens
from vime_hpc.rollout.source import PromptSource
from vime_hpc.rollout.tiny_policy import byte_tokenizer
from vime_hpc.rollout.tokenizer import PromptTokenizer
from vime_hpc.types import Prompt, Status


def sft(source: PromptSource, tokenizer: PromptTokenizer, **options: Any) -> SftGenerator:
    config = RolloutConfig(**{"prompts_per_step": 3, "group_size": 8, **options})
    return SftGenerator(
        source=source, tokenizer=tokenizer, data=DataConfig(train="x"), config=config
    )


def test_labels_become_trained_responses_that_end(
    make_source: Callable[..., PromptSource], tokenizer: PromptTokenizer
) -> None:
    groups, metrics = sft(make_source(), tokenizer).generate(0, 0)
    assert [len(g.samples) for g in groups] == [1, 1, 1]
    sample = groups[2].samples[0]
    assert sample.tokens[-2:].tolist() == [ord("2"), END]
    assert sample.loss_mask.tolist() == [1, 1]
    assert sample.rollout_logprobs.tolist() == [0.0, 0.0]
    assert (sample.status, sample.reward, sample.reward_cause) == (Status.COMPLETED, None, "sft")
    rendered = tokenizer.render([{"role": "user", "content": "p2"}, {"role": "assistant", "content": "2"}],
                                add_generation_prompt=False)  # fmt: skip
    assert sample.tokens.tolist() == tokenizer.encode_rendered(rendered).tolist()
    assert metrics["rollout/response_tokens"] == 6


def test_sft_goes_on_where_its_state_says(
    make_source: Callable[..., PromptSource], tokenizer: PromptTokenizer
) -> None:
    one = sft(make_source(), tokenizer)
    one.generate(0, 0)
    two = sft(make_source(), tokenizer)
    two.restore(one.state())
    assert [g.prompt_id for g in two.generate(1, 1)[0]] == [3, 4, 5]


def test_long_labels_are_truncated_without_their_end(
    make_source: Callable[..., PromptSource], tokenizer: PromptTokenizer
) -> None:
    sample = sft(make_source(), tokenizer, max_response_tokens=1).generate(0, 0)[0][0].samples[0]
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, 1)


def test_a_template_that_ends_turns_with_something_else_is_refused() -> None:
    hf = byte_tokenizer()
    hf.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(PromptDataError, match="eos_token"):
        end_of_turn(PromptTokenizer(hf))


def test_a_prompt_without_label_cannot_be_learnt_from(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(PromptDataError, match="no label"):
        label_tokens(Prompt(0, np.array([1], dtype=np.int32), "p"), tokenizer, chat=True)


@pytest.fixture
def make_evaluator(make_source: Callable[..., PromptSource], tokenizer: PromptTokenizer, runner: BackgroundLoop,
                   tmp_path: Path) -> Callable[..., EngineEvaluator]:  # fmt: skip
    def make(client: Any, *, seen: list[Any] | None = None, **options: Any) -> EngineEvaluator:
        rollout = RolloutConfig(reward="exact", max_attempts=2)
        evaluation = EvalConfig(**{"num_prompts": 5, **options})
        return EngineEvaluator(
            EvalOptions(evaluation, rollout, 1, tmp_path),
            prompts=make_source().prompts,
            client=client,
            rewards=RewardRunner(rollout),
            decode=tokenizer.decode,
            runner=runner,
            on_metrics=(lambda version, metrics: seen.append((version, metrics))) if seen is not None else None,
        )  # fmt: skip

    return make


def echo(prompt: Any, seed: int) -> Answer:
    """Answers the prompt's digit: right for every prompt of the file."""
    return Answer([prompt[2], END], [-0.1, -0.1])


def test_evaluation_writes_its_results_and_does_not_repeat_itself(make_evaluator: Callable[..., EngineEvaluator],
                                                                  tmp_path: Path) -> None:  # fmt: skip
    client, seen = SeededClient(fault=echo), []
    evaluator = make_evaluator(client, seen=seen, group_size=2)
    for version in (0, 0, 1):
        evaluator.evaluate_if_due(version)
    evaluator.evaluate_if_due(2, last=True)
    assert len(client.calls) == 2 * 5 * 2
    record = json.loads((tmp_path / "eval" / "step-000002.json").read_text())
    assert record["metrics"]["eval/reward"] == 1.0
    assert [row["response"] for row in record["samples"][:4]] == ["0", "0", "1", "1"]
    lines = [
        json.loads(line) for line in (tmp_path / "eval" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [0, 2]
    assert [version for version, _ in seen] == [0, 2]


def test_evaluation_comes_every_interval_and_draws_the_same_seeds(
    make_evaluator: Callable[..., EngineEvaluator],
) -> None:
    client = SeededClient()
    evaluator = make_evaluator(client, interval=2)
    evaluator.evaluate_if_due(1)
    assert client.calls == []
    evaluator.evaluate_if_due(2)
    evaluator.evaluate_if_due(4)
    assert client.calls[:5] == client.calls[5:]


def test_requests_that_fail_are_unusable_in_the_mean_not_zero(
    make_evaluator: Callable[..., EngineEvaluator],
) -> None:
    def fault(prompt: Any, seed: int) -> Answer:
        if prompt[2] == ord("3"):
            raise EngineError("HTTP 503")
        return echo(prompt, seed)

    metrics = make_evaluator(SeededClient(fault=fault)).evaluate(7)
    assert metrics["eval/reward"] == 1.0
    assert metrics["eval/unusable_share"] == pytest.approx(0.2)


def test_an_evaluation_without_any_grade_stops_with_the_cause(make_evaluator: Callable[..., EngineEvaluator],
                                                              tmp_path: Path) -> None:  # fmt: skip
    def fault(prompt: Any, seed: int) -> None:
        raise EngineError("HTTP 503")

    with pytest.raises(VimeError, match="HTTP 503"):
        make_evaluator(SeededClient(fault=fault)).evaluate(7)
    assert not (tmp_path / "eval").exists()
