"""Tiny Hugging Face models and batches for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vime_hpc.types import Sample, SampleTable, Status, rollout_id_of, sample_id_of


def make_model(
    path: Path, *, kind: str = "qwen3", tied: bool = False, vocab: int = 250, **options: Any
) -> Path:
    """A random model whose logits differ clearly (initializer_range 0.2); 4 layers, 8 heads, 4
    key/value heads.
    """
    import torch
    import transformers as hf

    torch.manual_seed(0)
    common = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-6,
    } | options
    if kind == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**common))
    elif kind == "qwen3_moe":
        model = hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(
                **common,
                num_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                norm_topk_prob=True,
            )
        )
    elif kind == "qwen2":
        common.pop("head_dim")
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**common))
    else:
        common.pop("head_dim")
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**common))
    with torch.no_grad():  # norms and biases of 1 and 0 would hide a mix-up
        for name, param in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                param.add_(torch.randn_like(param) * 0.1)
    model.config.dtype = "float32"
    model.float().save_pretrained(path)
    (path / "tokenizer.json").write_text('{"made": "by the test"}')
    return path


def make_samples(
    num_groups: int = 3,
    group_size: int = 4,
    *,
    seed: int = 5,
    vocab: int = 250,
    equal_rewards: bool = False,
) -> list[Sample]:
    """Samples of different lengths, masks with holes, distinct rewards within a group."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(num_groups):
        for index in range(group_size):
            prompt, response = int(rng.integers(2, 9)), int(rng.integers(3, 20))
            mask = (rng.random(response) > 0.2).astype(np.uint8)
            mask[-1] = 1
            rollout = rollout_id_of(group, index)
            samples.append(
                Sample(
                    sample_id=sample_id_of(rollout),
                    group_id=group,
                    rollout_id=rollout,
                    prompt_id=group,
                    index_in_group=index,
                    tokens=rng.integers(0, vocab, prompt + response).astype(np.int32),
                    response_length=response,
                    loss_mask=mask,
                    rollout_logprobs=rng.normal(-3, 1, response).astype(np.float32),
                    status=Status.COMPLETED,
                    reward=1.0 if equal_rewards else float(rng.normal()),
                )
            )
    return samples


def table_of(samples: Sequence[Sample]) -> SampleTable:
    """The per-sample scalars of a batch."""

    def column(values: list[Any], dtype: type = np.int64) -> np.ndarray:
        return np.array(values, dtype=dtype)

    return SampleTable(
        sample_id=column([s.sample_id for s in samples]),
        group_id=column([s.group_id for s in samples]),
        rollout_id=column([s.rollout_id for s in samples]),
        prompt_length=column([s.prompt_length for s in samples]),
        response_length=column([s.response_length for s in samples]),
        mask_sum=column([int(s.loss_mask.sum()) for s in samples]),
        reward=column(
            [float("nan") if s.reward is None else s.reward for s in samples], np.float64
        ),
        reward_usable=column([s.reward is not None for s in samples], np.bool_),
        truncated=column([False] * len(samples), np.bool_),
        weight_version=column([0] * len(samples)),
    )


@dataclass
class MemoryBatch:
    """A StepBatch whose samples are in memory."""

    samples: list[Sample]
    step: int = 0
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def table(self) -> SampleTable:
        return table_of(self.samples)

    def read(self, indices: Sequence[int], *, layers: slice | None = None) -> list[Sample]:
        return [self.samples[i] for i in indices]


def with_rollout_logprobs(
    samples: Sequence[Sample], logprobs: Sequence[np.ndarray]
) -> list[Sample]:
    """The same samples with the engine's logprobs replaced."""
    return [
        replace(s, rollout_logprobs=lp.astype(np.float32))
        for s, lp in zip(samples, logprobs, strict=True)
    ]
