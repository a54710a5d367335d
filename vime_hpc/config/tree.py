"""The whole configuration of a run, and the checks that span sections."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from vime_hpc.config.algorithm import AlgorithmConfig, OptimizerConfig
from vime_hpc.config.cluster import ClusterConfig
from vime_hpc.config.data import DataConfig
from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import (
    BufferConfig,
    CheckpointConfig,
    EngineConfig,
    ObserveConfig,
    TrainerConfig,
    WeightSyncConfig,
)
from vime_hpc.config.rollout import EvalConfig, RolloutConfig
from vime_hpc.config.run import RunSection
from vime_hpc.config.section import Section


class RunConfig(Section):
    """Everything one run is made from. [vllm] and [router] are handed through to those programs' own parsers."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    weights: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM's own server options by their flag names without the dashes: max-num-seqs = 64."""
    router: dict[str, Any] = Field(default_factory=dict)
    """vllm-router's own options: policy = "round_robin"."""

    @model_validator(mode="after")
    def _layout(self) -> RunConfig:
        t = self.trainer
        if t.num_ranks % (t.tp * t.pp * t.cp):
            raise ValueError(
                f"trainer.num_ranks = {t.num_ranks} is not a multiple of tp * pp * cp = {t.tp} * {t.pp} * {t.cp} = "
                f"{t.tp * t.pp * t.cp}; set trainer.num_ranks to a multiple of it"
            )
        return self

    @model_validator(mode="after")
    def _modes(self) -> RunConfig:
        if self.run.train_from and self.run.mode != "train_only":
            raise ValueError(
                f'run.train_from = "{self.run.train_from}" goes with run.mode = "train_only", and run.mode is '
                f'"{self.run.mode}"; set --run.mode=train_only, or leave run.train_from out'
            )
        if self.run.mode == "rollout_only" and self.algorithm.loss == "sft":
            raise ValueError(
                'run.mode = "rollout_only" generates with engines, and algorithm.loss = "sft" has none; set '
                "--algorithm.loss=policy, or --run.mode=train"
            )
        return self

    @model_validator(mode="after")
    def _roles(self) -> RunConfig:
        generates = self.algorithm.loss != "sft" and self.run.mode != "train_only"
        if generates and self.engine.num_engines == 0:
            raise ValueError(
                "engine.num_engines = 0, but this run generates rollouts; set it to 1 or more "
                '(0 goes with algorithm.loss = "sft" or run.mode = "train_only")'
            )
        if self.engine.sleep_level and (
            self.rollout.max_weight_lag or self.rollout.num_workers > 1 or self.run.mode != "train"
        ):
            raise ValueError(
                f"engine.sleep_level = {self.engine.sleep_level} needs engines that have nothing to do while a step is trained: "
                f'rollout.max_weight_lag = 0, rollout.num_workers = 1 and run.mode = "train"; found '
                f'{self.rollout.max_weight_lag}, {self.rollout.num_workers} and "{self.run.mode}". Set those, or '
                f"--engine.sleep_level=0"
            )
        if (
            self.algorithm.loss == "policy"
            and self.rollout.group_size == 1
            and self.algorithm.advantage.startswith("grpo")
        ):
            raise ValueError(
                "rollout.group_size = 1 gives every GRPO advantage the value 0; use at least 2, "
                "or another algorithm.advantage"
            )
        return self
