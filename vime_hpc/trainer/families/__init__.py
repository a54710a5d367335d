"""Model families: one file each. A new one is a file here, a line in FAMILIES and its name in trainer/layout.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime_hpc.errors import ConfigError
from vime_hpc.trainer.families import llama, qwen2, qwen3, qwen3_moe
from vime_hpc.trainer.families.base import ModelFamily

FAMILIES: Mapping[str, ModelFamily] = {
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "LlamaForCausalLM": llama.FAMILY,
}


def family_of(hf: Mapping[str, Any]) -> ModelFamily:
    """The family of a parsed config.json, by its `architectures` entry."""
    architecture = (hf.get("architectures") or ["?"])[0]
    if architecture not in FAMILIES:
        raise ConfigError(
            f"model.path: architecture {architecture!r} is not supported by the trainer; supported are "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]
