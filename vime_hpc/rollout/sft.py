"""Supervised warm-up through the same loops: the data set's own labels as responses, no engine.

A sample is the rendered prompt, then the label as the assistant's turn up to and with the token
that ends it. The loss reads tokens and mask only; rewards are unusable by design (cause "sft").
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from vime_hpc.config.data import DataConfig
from vime_hpc.config.rollout import RolloutConfig
from vime_hpc.errors import PromptDataError
from vime_hpc.protocols import Metrics
from vime_hpc.rollout.metrics import rollout_metrics
from vime_hpc.rollout.source import PromptSource
from vime_hpc.rollout.tokenizer import PromptTokenizer
from vime_hpc.types import (
    Prompt,
    PromptGroup,
    Sample,
    Status,
    TokenArray,
    VersionSpan,
    rollout_id_of,
    sample_id_of,
)


class SftGenerator:
    """A protocols.Generator that writes the labels down; a group has one sample whatever
    rollout.group_size says.
    """

    def __init__(self, *, source: PromptSource, tokenizer: PromptTokenizer, data: DataConfig,
                 config: RolloutConfig, num_groups: int | None = None) -> None:  # fmt: skip
        self._source, self._tokenizer = source, tokenizer
        self._data, self._config = data, config
        self._num_groups = config.prompts_per_step if num_groups is None else num_groups

    def generate(self, step: int, version: int) -> tuple[list[PromptGroup], Metrics]:
        """The next prompts_per_step prompts with their labels.

        Raises:
            PromptDataError: a prompt without a label, or a chat template that cannot be continued.
        """
        started = time.monotonic()
        groups = []
        for _ in range(self._num_groups):
            request = self._source.next_request()
            sample = self._sample(request.group_id, request.prompt, version)
            groups.append(PromptGroup(request.group_id, request.prompt.prompt_id, (sample,)))
        metrics = rollout_metrics(groups, step=step)
        del metrics["rollout/unusable_share"]  # of rewards, and there are none to be had
        metrics["rollout/epoch"] = self._source.epoch()
        metrics["perf/rollout_time"] = time.monotonic() - started
        return groups, metrics

    def state(self) -> Mapping[str, Any]:
        """Resume state once the step just generated is committed."""
        return self._source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue behind the last committed step."""
        self._source.restore(state)

    def _sample(self, group_id: int, prompt: Prompt, version: int) -> Sample:
        response = label_tokens(prompt, self._tokenizer, chat=self._data.apply_chat_template)
        limit = self._config.max_response_tokens
        truncated = len(response) > limit
        response = response[:limit]
        rollout_id = rollout_id_of(group_id, 0)
        return Sample(
            sample_id=sample_id_of(rollout_id),
            group_id=group_id,
            rollout_id=rollout_id,
            prompt_id=prompt.prompt_id,
            index_in_group=0,
            tokens=np.concatenate([prompt.tokens, response]),
            response_length=len(response),
            loss_mask=np.ones(len(response), dtype=np.uint8),
            rollout_logprobs=np.zeros(len(response), dtype=np.float32),
            status=Status.TRUNCATED if truncated else Status.COMPLETED,
            finish_reason="length" if truncated else "stop",
            reward_cause="sft",
            versions=(VersionSpan(version, 0),),
            prompt_text=prompt.text,
            response_text=self._tokenizer.decode(response),
        )


def label_tokens(prompt: Prompt, tokenizer: PromptTokenizer, *, chat: bool) -> TokenArray:
    """[R] ids of the label as the response to this prompt, with the token that ends it.

    With a chat template the end is the template's own: what it writes behind an assistant message,
    up to the tokenizer's eos_token.

    Raises:
        PromptDataError: no label.
    """
    if prompt.label is None:
        raise PromptDataError(
            f"prompt {prompt.prompt_id} has no label (data.label_key), which algorithm.loss = sft learns from"
        )
    response = tokenizer.encode_continuation(str(prompt.label))
    end = tokenizer.eos_token_id
    if chat:
        end = end_of_turn(tokenizer)
    return np.append(response, np.int32(end)).astype(np.int32)


def end_of_turn(tokenizer: PromptTokenizer) -> int:
    """The token the chat template writes behind an assistant's words; generation must stop at it
    too.

    Raises:
        PromptDataError: the template ends a turn with something that is not the tokenizer's
            eos_token.
    """
    marker = "\x02"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
    text = tokenizer.render(messages, add_generation_prompt=False)
    tail = tokenizer.encode_continuation(text.rpartition(marker)[2]).tolist()
    if tokenizer.eos_token_id not in tail[:1]:
        raise PromptDataError(
            f"the chat template of {tokenizer.hf.name_or_path} ends an assistant turn with "
            f"{tokenizer.hf.decode(tail)!r}, not with its eos_token {tokenizer.hf.eos_token!r}; the engine would "
            f"not stop where the policy learns to. Make eos_token the template's end of turn"
        )
    return tokenizer.eos_token_id
