"""Can this model be cut this way? Answered from config.json alone, without torch, so that a command
can refuse early.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vime_hpc.config.parts import TrainerConfig
from vime_hpc.errors import ConfigError

SUPPORTED_ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
)


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face model directory.

    Raises:
        ConfigError: no such directory, no config.json in it, or not a JSON object.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"model.path = {str(path)!r} is not a directory; expected one with config.json, *.safetensors and the "
            f"tokenizer. Compute nodes have no internet, so a hub name does not work: download the model on a login "
            f"node first. (bash tools/quickstart.sh makes the models of its recipes, vime-hpc data model --out DIR a tiny one)"
        )
    file = directory / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{file} is missing; model.path must be a Hugging Face model directory, and "
            f"{directory} holds {sorted(p.name for p in directory.iterdir())[:8]}"
        )
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} is not valid JSON ({error}); copy the model directory again"
        ) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file} holds a {type(loaded).__name__}, expected a JSON object")
    return loaded


def check_layout(hf_config: dict[str, Any], trainer: TrainerConfig) -> None:
    """Refuse a trainer layout that cannot cut this model.

    Args:
        hf_config: the parsed config.json.
        trainer: the [trainer] section.
    Raises:
        ConfigError: names the option, the two numbers that do not fit and values that would.
    """
    architecture = (hf_config.get("architectures") or ["?"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"model.path: architecture {architecture!r} is not supported by the trainer; supported are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    heads = int(hf_config["num_attention_heads"])
    kv_heads = int(hf_config.get("num_key_value_heads") or heads)
    layers = int(hf_config["num_hidden_layers"])
    experts = int(
        hf_config.get("num_experts") or hf_config.get("num_local_experts") or 0
    )  # transformers 5 renamed it
    intermediate = (
        int(hf_config.get("moe_intermediate_size") or 0)
        if experts
        else int(hf_config["intermediate_size"])
    )
    _must_divide("tp", trainer.tp, heads, "attention heads (num_attention_heads)")
    _must_divide("tp", trainer.tp, kv_heads, "key/value heads (num_key_value_heads)")
    if not experts:
        _must_divide("tp", trainer.tp, intermediate, "columns of the MLP (intermediate_size)")
    _must_divide("pp", trainer.pp, layers, "layers (num_hidden_layers)")
    if trainer.cp != 1:
        raise ConfigError(
            f"trainer.cp = {trainer.cp}: packed sequences cannot be cut over context parallel ranks yet; "
            "set trainer.cp = 1 and, for long samples, raise trainer.tp or use trainer.recompute"
        )
    if trainer.ep != 1 and not experts:
        raise ConfigError(
            f"trainer.ep = {trainer.ep}, but {architecture} has no experts; set trainer.ep = 1"
        )
    if experts:
        _must_divide("ep", trainer.ep, experts, "experts (num_experts)")
        dense_ranks = trainer.num_ranks // trainer.pp
        _must_divide("ep", trainer.ep, dense_ranks, "ranks of a pipeline stage (num_ranks / pp)")
        if trainer.tp > 1 and not trainer.sequence_parallel:
            raise ConfigError(
                f"trainer.tp = {trainer.tp} with an MoE model needs trainer.sequence_parallel = true "
                "(Megatron-Core trains MoE under tensor parallelism only so)"
            )
    per_replica = trainer.tp * trainer.pp * trainer.cp
    if trainer.num_ranks % per_replica:
        raise ConfigError(
            f"trainer.num_ranks = {trainer.num_ranks} is not a multiple of tp * pp * cp = {per_replica}"
        )


def _must_divide(option: str, size: int, number: int, what: str) -> None:
    if number % size:
        fitting = [d for d in range(1, number + 1) if number % d == 0]
        raise ConfigError(
            f"trainer.{option} = {size} does not divide the model's {number} {what}; "
            f"choose one of {', '.join(map(str, fitting))}"
        )
