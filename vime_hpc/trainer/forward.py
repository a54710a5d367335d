"""Packed microbatches through megatron's schedule (no pipeline, 1F1B), with log-probabilities at
the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from vime_hpc.trainer.head import vocab_parallel_logprobs
from vime_hpc.trainer.microbatch import Microbatch
from vime_hpc.trainer.model import TrainedModel

Loss = Callable[[int, Microbatch, Tensor, Tensor], Tensor]
"""(index of the microbatch, it, logprobs [R], entropy [R]) -> its summand of the step's loss, a
scalar.
"""


class PackedForward:
    """Runs one model over lists of microbatches."""

    def __init__(self, model: TrainedModel, *, temperature: float, chunk_tokens: int) -> None:
        """temperature: logits are divided by it; chunk_tokens: tokens whose logits are in memory at
        once.
        """
        self.model = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    @torch.no_grad()
    def logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Per microbatch the [R] float32 logprobs of its response tokens; on stages before the last
        an empty list.
        """

        def keep(
            index: int, microbatch: Microbatch, output: Tensor, non_loss_data: bool = False
        ) -> Tensor:
            return self._head(microbatch, output)[0]

        return self._run(microbatches, keep, forward_only=True)

    def backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> None:
        """Forward and backward of every microbatch; gradients of the sum of their losses stand in
        main_grad after it.
        """

        def step_loss(
            index: int, microbatch: Microbatch, output: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, Any]]:
            # Three values and calculate_per_token_loss: megatron then divides by nothing.
            return (
                loss(index, microbatch, *self._head(microbatch, output)),
                torch.zeros((), dtype=torch.int),
                {},
            )

        self._run(microbatches, step_loss, forward_only=False)

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        on_output: Callable[..., Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        def forward_step(
            source: Iterator[tuple[int, Microbatch]], wrapped: torch.nn.Module
        ) -> tuple[Tensor, Any]:
            index, microbatch = next(source)
            output = wrapped(
                microbatch.tokens, microbatch.positions, None, packed_seq_params=microbatch.packed
            )
            return output, lambda out, **kwargs: on_output(index, microbatch, out, **kwargs)

        result = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(list(enumerate(microbatches))),
            model=self.model.wrapped,
            num_microbatches=len(microbatches),
            micro_batch_size=1,
            seq_length=max(
                microbatch.num_tokens for microbatch in microbatches
            ),  # unused: lengths travel with the data
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return list(result)

    def _head(self, microbatch: Microbatch, output: Tensor) -> tuple[Tensor, Tensor]:
        """output [1, T, H] (T / tp under sequence parallelism) -> logprobs and entropy, [R] each."""
        hidden = output[0]
        tp = self.model.ranks.tp_size
        if self.model.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True
            )
        hidden = hidden.index_select(0, microbatch.predict)  # prompt positions need no logits
        if tp > 1 and not self.model.config.sequence_parallel:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        weight, start = self.model.output_weight()
        group = mpu.get_tensor_model_parallel_group() if tp > 1 else None
        return vocab_parallel_logprobs(
            hidden,
            weight,
            microbatch.targets,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            vocab_start=start,
            group=group,
        )
