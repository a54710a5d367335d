"""The scheduler and the evaluator over a real vLLM engine with a tiny random policy."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_hpc.config.data import DataConfig
from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import EngineConfig
from vime_hpc.config.rollout import EvalConfig, RolloutConfig
from vime_hpc.engine.client import EngineHTTPClient
from vime_hpc.engine.server import EngineServer
from vime_hpc.rollout.evaluate import EngineEvaluator, EvalOptions
from vime_hpc.rollout.event_loop import BackgroundLoop
from vime_hpc.rollout.rewards.runner import RewardRunner
from vime_hpc.rollout.scheduler import RolloutScheduler
from vime_hpc.rollout.source import PromptSource, load_prompts
from vime_hpc.rollout.tiny_policy import TinyPolicy, make_tiny_policy
from vime_hpc.rollout.tokenizer import PromptTokenizer, load_tokenizer
from vime_hpc.types import PromptGroup, Status

pytestmark = pytest.mark.engine

TEMPERATURE = 0.7


@dataclass
class Parts:
    client: EngineHTTPClient
    runner: BackgroundLoop
    tokenizer: PromptTokenizer
    policy: Path
    prompts: str


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    root = tmp_path_factory.mktemp("engine")
    sizes = TinyPolicy(
        hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, initializer_range=0.2
    )
    make_tiny_policy(root / "policy", sizes)
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(8)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    token = root / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    server = EngineServer(
        EngineConfig(device="cpu"),
        ModelConfig(path=str(root / "policy"), dtype="float32"),
        vllm={},
        max_model_len=128,
        seed=1,
        index=0,
        host="127.0.0.1",
        token_file=token,
        log_path=root / "engine.log",
    )
    server.start()
    runner = BackgroundLoop()
    try:
        server.wait_ready(300.0)
        client = EngineHTTPClient([server.url], token.read_text().strip())
        runner.run(client.__aenter__())
        yield Parts(
            client,
            runner,
            load_tokenizer(root / "policy"),
            root / "policy",
            str(root / "train.jsonl"),
        )
        runner.run(client.__aexit__())
    finally:
        server.stop()
        runner.close()


def scheduler(parts: Parts, **options: Any) -> RolloutScheduler:
    config = RolloutConfig(
        **{
            "prompts_per_step": 2,
            "group_size": 3,
            "max_response_tokens": 12,
            "temperature": TEMPERATURE,
            "reward": "random",
            **options,
        }
    )
    prompts = load_prompts(parts.prompts, DataConfig(train=parts.prompts), parts.tokenizer)
    return RolloutScheduler(
        source=PromptSource(prompts, seed=1, group_size=config.group_size),
        client=parts.client,
        rewards=RewardRunner(config),
        config=config,
        run_seed=1,
        decode=parts.tokenizer.decode,
        runner=parts.runner,
    )


def content(groups: Sequence[PromptGroup]) -> list[Any]:
    return [
        (s.sample_id, s.tokens.tolist(), s.rollout_logprobs.tolist(), s.reward)
        for group in groups
        for s in group.samples
    ]


def test_two_runs_of_a_step_are_equal_bit_for_bit(parts: Parts) -> None:
    first = content(scheduler(parts).generate(0, 0)[0])
    again = content(scheduler(parts, concurrency=1).generate(0, 0)[0])
    assert first == again
    assert len({tuple(tokens) for _, tokens, _, _ in first}) > 2, "siblings have seeds of their own"


def test_logprobs_are_those_of_the_temperature_scaled_policy(parts: Parts) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(parts.policy), dtype=torch.float32).eval()
    groups, _ = scheduler(parts).generate(0, 0)
    for sample in (s for group in groups for s in group.samples):
        tokens = torch.tensor(sample.tokens, dtype=torch.int64)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].float()
        logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)[:-1].gather(1, tokens[1:, None])[
            :, 0
        ]
        expected = logprobs[-sample.response_length :]
        found = torch.from_numpy(sample.rollout_logprobs.copy())
        assert float((expected - found).abs().max()) < 1e-4
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)


def test_surplus_requests_leave_the_engine_usable(parts: Parts) -> None:
    busy = scheduler(parts, over_sampling=4.0, max_response_tokens=60, prompts_per_step=1)
    assert [g.group_id for g in busy.generate(0, 0)[0]] == [0]
    assert [g.group_id for g in busy.generate(1, 1)[0]] == [1]


def test_greedy_evaluation_gives_the_same_answer_every_time(parts: Parts, tmp_path: Path) -> None:
    rollout = RolloutConfig(max_response_tokens=8)
    prompts = load_prompts(parts.prompts, DataConfig(train=parts.prompts), parts.tokenizer)
    responses = []
    for name in ("a", "b"):
        evaluator = EngineEvaluator(
            EvalOptions(EvalConfig(temperature=0.0, num_prompts=4), rollout, 1, tmp_path / name),
            prompts=prompts,
            client=parts.client,
            rewards=RewardRunner(rollout),
            decode=parts.tokenizer.decode,
            runner=parts.runner,
        )
        metrics = evaluator.evaluate(0)
        assert metrics["eval/unusable_share"] == 0.0
        record = json.loads((tmp_path / name / "eval" / "step-000000.json").read_text())
        responses.append([row["response"] for row in record["samples"]])
    assert responses[0] == responses[1]
