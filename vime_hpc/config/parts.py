"""[trainer], [engine], [weights], [buffer], [checkpoint], [observe]: the machinery."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vime_hpc.config.section import Section


class TrainerConfig(Section):
    """Megatron-Core ranks and their layout: num_ranks = tp * pp * cp * dp."""

    num_ranks: PositiveInt = 1
    """Trainer processes in all."""
    tp: PositiveInt = 1
    """Tensor parallel size."""
    pp: PositiveInt = 1
    """Pipeline parallel size."""
    cp: PositiveInt = 1
    """Context parallel size."""
    ep: PositiveInt = 1
    """Expert parallel size."""
    sequence_parallel: bool = False
    """Shard norm and dropout activations over the tensor parallel ranks."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Tokens packed into one microbatch; a longer sample sits alone."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activation recomputation in the backward pass."""
    distributed_optimizer: bool = False
    """Shard optimizer state over the data parallel ranks."""
    logit_chunk_tokens: PositiveInt = 1024
    """Tokens whose vocabulary-sized logits are in memory in float32 at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes."""
    num_threads: PositiveInt = 1
    """CPU threads per trainer rank."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of every collective between trainer ranks."""


class EngineConfig(Section):
    """vLLM engines, each a server process of its own; behind vllm-router from two engines on."""

    num_engines: NonNegativeInt = 1
    """Engines in all; 0 only where nothing is generated (sft, train_only)."""
    server: str = "vllm.entrypoints.openai.api_server"
    """Module that is run as the server; another must take vLLM's arguments and answer its routes (the stub engine does)."""
    tp: PositiveInt = 1
    """Tensor parallel size of one engine."""
    max_model_len: PositiveInt | None = None
    """Context length; none = data.max_prompt_tokens + rollout.max_response_tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine computes."""
    kv_cache_gib: PositiveInt = 1
    """KV cache of one CPU engine (VLLM_CPU_KVCACHE_SPACE); a GPU engine takes vllm.gpu-memory-utilization."""
    num_threads: PositiveInt = 1
    """CPU threads per engine rank."""
    always_router: bool = False
    """Put the router in front of a single engine as well."""
    max_restarts: NonNegativeInt = 3
    """Restarts of one engine within one start of the job; its next end ends the job, which comes back."""
    sleep_level: Literal[0, 1, 2] = 0
    """Engines that share GPUs with the trainer free their memory while a step is trained. 1: KV cache dropped, weights to host
    memory; 2: both dropped (each publish brings all weights); 0: never. On the CPU it changes nothing."""


class WeightSyncConfig(Section):
    """How the trainer's weights reach the engines after an optimizer step."""

    transport: Literal["bridge", "disk", "delta", "ipc"] = "bridge"
    """bridge: process group of trainer and engine ranks; disk: full copy; delta: changed bytes; ipc: GPUs of one node."""
    send: Literal["parts", "whole"] = "parts"
    """bridge: "parts", every engine rank receives the slices it holds, learnt from one load of the model at the start; "whole",
    every rank receives every tensor."""
    bucket_mib: PositiveInt = 512
    """MiB sent per collective, and the extra memory held on every engine rank."""
    timeout_s: PositiveFloat = 300.0
    """Deadline of every phase of a publish."""
    keep_versions: PositiveInt = 2
    """disk, delta: newest versions kept in RUN/weights, besides what a kept delta builds on."""
    max_deltas: PositiveInt = 8
    """delta: versions of changed bytes in a row before a full one is written."""
    fsync: bool = True
    """disk, delta: force every file of a version to the device before the version exists."""
    verify_interval: NonNegativeInt = 1
    """Compare trainer and engine logprobs every so many steps: of the engine's own samples, and of a fixed prompt where those
    lag behind; 0 = never."""
    verify_tolerance: PositiveFloat = 0.1
    """Largest mean |old - rollout logprob| of a step before the run stops (float32 on a CPU: about 1e-6)."""


class BufferConfig(Section):
    """The rollout buffer on disk."""

    fsync: bool = True
    """Make every commit durable against power loss; off only for tests on throw-away data."""
    columns: list[str] = Field(default_factory=list)
    """Optional columns every segment has (docs/buffer-format.md lists them), for rollout functions that fill `Sample.columns`; a
    sample with another one is refused. Fixed for the whole run."""
    store_text: bool = True
    """Store prompt and response text beside the tokens."""


class CheckpointConfig(Section):
    """Model, optimizer and frontier, saved as one transaction."""

    interval: NonNegativeInt = 0
    """Steps between checkpoints; 0 = only at the end and on a stop signal."""
    keep: PositiveInt = 2
    """Newest complete checkpoints kept."""
    export_hf: bool = True
    """Write the final policy in Hugging Face form to RUN/export."""


class ObserveConfig(Section):
    """Logs, metrics, progress."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of the per-rank logs."""
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """auto: a table and a bar on a terminal, one line a step otherwise."""
