"""Build the policy as a Megatron-Core model: parallel groups, layers, Hugging Face weights, data
parallel wrapper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import TrainerConfig
from vime_hpc.errors import ConfigError
from vime_hpc.trainer import cuda_on_cpu
from vime_hpc.trainer.families import family_of
from vime_hpc.trainer.families.base import Conversion, ModelFamily, padded_vocab_size, shard
from vime_hpc.trainer.layout import check_layout, read_hf_config
from vime_hpc.trainer.rotary import PackedRotary
from vime_hpc.trainer.source import HfTensors
from vime_hpc.trainer.spec import Replay, block_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among the trainer ranks."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def reports(self) -> bool:
        """One rank of each replica's last stage: the one whose per-token numbers are counted."""
        return self.last_stage and self.tp_rank == 0


@dataclass
class TrainedModel:
    """A policy (or a frozen reference) on this rank: its pipeline stage, cut over the tensor
    parallel ranks.
    """

    module: GPTModel
    """The bare model of this stage."""
    wrapped: torch.nn.Module
    """The data parallel wrapper around it; the module itself when frozen."""
    config: TransformerConfig
    family: ModelFamily
    hf: dict[str, Any]
    """config.json."""
    source: Path
    """The Hugging Face directory it came from (config and tokenizer files for the export)."""
    ranks: Ranks
    device: torch.device
    padded_vocab: int

    @property
    def vocab_size(self) -> int:
        return int(self.hf["vocab_size"])

    @property
    def tied(self) -> bool:
        """Whether input embedding and output weights are one parameter."""
        return bool(self.hf.get("tie_word_embeddings", False))

    def parameters(self) -> Iterator[tuple[str, Tensor, Conversion]]:
        """(name in the whole model, this rank's tensor, how it is made), in an order equal on all
        ranks of a stage.
        """
        for name, param in self.module.named_parameters():
            whole = _global_name(name, self.module, self.config)
            yield whole, param, self.family.conversion(whole, self.hf, self.padded_vocab)

    def replays(self) -> dict[int, Replay]:
        """The replay of each MoE layer of this stage, by the layer's number in the whole model."""
        return {
            layer.layer_number - 1: layer.mlp.router.router_replay
            for layer in self.module.decoder.layers
            if getattr(getattr(layer.mlp, "router", None), "router_replay", None) is not None
        }

    def output_weight(self) -> tuple[Tensor, int]:
        """This rank's rows of the output weights without vocabulary padding, and the token id of
        the first one.
        """
        weight = (
            self.module.shared_embedding_or_output_weight()
            if self.tied
            else self.module.output_layer.weight
        )
        start = self.ranks.tp_rank * weight.shape[0]
        return weight[: max(0, min(weight.shape[0], self.vocab_size - start))], start

    def copy_weights_from(self, other: TrainedModel) -> None:
        """Make this model's weights equal to those of another one of the same layout."""
        with torch.no_grad():
            for mine, theirs in zip(
                self.module.parameters(), other.module.parameters(), strict=True
            ):
                mine.copy_(theirs)


class HiddenStatesOut(ColumnParallelLinear):  # type: ignore[misc]
    """The output layer that hands the hidden states on: trainer/head.py makes logits chunk by chunk
    from its weight.
    """

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        return input_, None


def build_model(
    model: ModelConfig,
    trainer: TrainerConfig,
    *,
    seed: int = 1,
    frozen: bool = False,
    router_replay: bool = False,
) -> TrainedModel:
    """The model of this rank, with the weights of `model.path`. Collective over the trainer ranks.

    torch.distributed must be initialised with its default group over exactly the trainer ranks
    (gloo on a CPU, nccl on CUDA, its timeout = trainer.timeout_s), and `cuda_on_cpu.install()`
    called before megatron was imported.

    Args:
        model: the [model] section.
        trainer: the [trainer] section; the first call makes Megatron's process groups from it.
        seed: of Megatron's random states (no layer here draws from them while dropout is 0).
        frozen: a reference: no gradients, no data parallel wrapper.
        router_replay: MoE routers can record and replay which experts they chose (`replays`).
    Raises:
        ConfigError: no such model directory, a layout that cannot cut it, tensors missing from it.
    """
    hf = read_hf_config(model.path)
    check_layout(hf, trainer)
    device = _device(trainer)
    _start_parallel(trainer, seed)
    family = family_of(hf)
    padded_vocab = padded_vocab_size(int(hf["vocab_size"]), trainer.tp)
    config = transformer_config(family, hf, model, trainer, device)
    config.moe_enable_routing_replay = router_replay and config.num_moe_experts is not None
    rotary = family.gpt_kwargs(hf)
    config.vime_hpc_rotary = _rotary(config, int(hf["max_position_embeddings"]), **rotary)
    gpt = GPTModel(
        config,
        block_spec(config),
        vocab_size=padded_vocab,
        max_sequence_length=int(hf["max_position_embeddings"]),
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
        position_embedding_type="none",  # the attention core applies it: rotary.py
    )
    gpt.to(device)
    if gpt.post_process:
        gpt.output_layer.__class__ = HiddenStatesOut
    built = TrainedModel(
        gpt, gpt, config, family, hf, Path(model.path), _ranks(), device, padded_vocab
    )
    _mark_cut_weights(built)
    _load_hf(built)
    if frozen:
        gpt.requires_grad_(False)
        gpt.eval()
    else:
        built.wrapped = _data_parallel(gpt, config, trainer)
    return built


def transformer_config(
    family: ModelFamily,
    hf: dict[str, Any],
    model: ModelConfig,
    trainer: TrainerConfig,
    device: torch.device,
) -> TransformerConfig:
    """Megatron's configuration: what config.json decides, the layout, and the switches that need no
    TransformerEngine.
    """
    dtype = DTYPES[model.dtype]
    config = TransformerConfig(
        **family.transformer_kwargs(hf),
        tensor_model_parallel_size=trainer.tp,
        pipeline_model_parallel_size=trainer.pp,
        context_parallel_size=trainer.cp,
        expert_model_parallel_size=trainer.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=trainer.sequence_parallel and trainer.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        # microbatches differ in length; megatron-core asks for alltoall with it, for dense models
        # too
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # the loss arrives with its denominators in it; see _finalize
        calculate_per_token_loss=True,
        # all of these need TransformerEngine or apex, or compile with g++ at first use
        masked_softmax_fusion=False,
        bias_activation_fusion=device.type == "cuda",  # torch.compile; on a CPU it needs g++
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **_recompute(trainer),
    )
    config.finalize_model_grads_func = _finalize
    config.vime_hpc_attention = _attention(model, device)
    return config


def _rotary(
    config: TransformerConfig, positions: int, *, position_embedding_type: str, **options: Any
) -> PackedRotary:
    """Megatron's own angles, for as many positions as the model knows."""
    assert position_embedding_type == "rope"
    embedding = RotaryEmbedding(
        kv_channels=config.kv_channels,
        use_cpu_initialization=config.use_cpu_initialization,
        **options,
    )
    return PackedRotary(embedding.get_freqs_non_repeated(positions))


def _finalize(
    model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any
) -> None:
    """Sum gradients over ranks and divide by nothing: the loss is already the whole step's (no mean
    of means).
    """
    finalize_model_grads(model, None, **kwargs)


def _recompute(trainer: TrainerConfig) -> dict[str, Any]:
    if trainer.recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if trainer.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _attention(model: ModelConfig, device: torch.device) -> str:
    if model.attention == "varlen" and device.type != "cuda":
        raise ConfigError(
            'model.attention = "varlen" needs CUDA, and the trainer computes on the CPU; '
            'set model.attention = "auto"'
        )
    # the varlen kernel is FlashAttention, which takes half precision only
    wants = model.attention == "varlen" or (model.attention == "auto" and model.dtype == "bfloat16")
    return "varlen" if device.type == "cuda" and wants else "sdpa"


def _device(trainer: TrainerConfig) -> torch.device:
    if torch.cuda.is_available() and trainer.device == "cpu":
        raise ConfigError(
            'trainer.device = "cpu" on a machine with CUDA: Megatron-Core takes the GPU wherever it sees '
            'one; start the job with CUDA_VISIBLE_DEVICES= (empty), or set trainer.device = "auto"'
        )
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if trainer.device == "cuda":
        raise ConfigError(
            'trainer.device = "cuda", but torch finds no CUDA device here; ask Slurm for GPUs '
            '(cluster.components.trainer.gpus-per-node), or set trainer.device = "auto"'
        )
    if not cuda_on_cpu.installed():
        raise RuntimeError(
            "call vime_hpc.trainer.cuda_on_cpu.install() before importing megatron on a CPU"
        )
    return torch.device("cpu")


def _start_parallel(trainer: TrainerConfig, seed: int) -> None:
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(
            trainer.tp,
            trainer.pp,
            context_parallel_size=trainer.cp,
            expert_model_parallel_size=trainer.ep,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=max(1, math.ceil(trainer.timeout_s / 60)),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _ranks() -> Ranks:
    return Ranks(
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
    )


def _data_parallel(
    gpt: GPTModel, config: TransformerConfig, trainer: TrainerConfig
) -> torch.nn.Module:
    for name, param in gpt.named_parameters():
        if ".experts." in name:
            # up to megatron-core 0.18, EP = ETP = 1 with TP > 1 sums expert gradients over the
            # wrong ranks without it
            param.allreduce = False
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=trainer.distributed_optimizer,
    )
    return DistributedDataParallel(config, ddp, gpt)  # type: ignore[no-any-return]


def _global_name(name: str, module: GPTModel, config: TransformerConfig) -> str:
    """The parameter's name with the layer and expert numbers of the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + module.decoder.layers[0].layer_number - 1)
        if "local_experts" in parts:
            per_rank = config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
            at = parts.index("local_experts") + 1
            parts[at] = str(int(parts[at]) + mpu.get_expert_model_parallel_rank() * per_rank)
    return ".".join(parts)


def _mark_cut_weights(model: TrainedModel) -> None:
    """What megatron sets while it initialises weights, which we leave to the load: without it the
    gradient norm counts cut weights once instead of once a rank (TP2 of the test model: 5.52
    instead of 7.42), and so clips wrongly."""
    for _, param, conversion in model.parameters():
        if conversion.cut is not None:
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
            param.partition_dim = 1 if conversion.cut == "columns" else 0  # type: ignore[attr-defined]
            param.partition_stride = 1  # type: ignore[attr-defined]


@torch.no_grad()
def _load_hf(model: TrainedModel) -> None:
    tensors = HfTensors(model.source)
    for name, param, conversion in model.parameters():
        rank, size = (0, 1) if ".experts." in name else (model.ranks.tp_rank, model.ranks.tp_size)
        part = shard(
            conversion.join([tensors.get(n) for n in conversion.names]), conversion.cut, rank, size
        )
        if part.shape != param.shape:
            raise ConfigError(
                f"model.path = {str(model.source)!r}: {' + '.join(conversion.names)} gives {tuple(part.shape)} for "
                f"{name}, config.json asks for {tuple(param.shape)}; config.json and safetensors do not belong together"
            )
        param.copy_(part)
