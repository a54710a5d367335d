"""[model]: the policy."""

from __future__ import annotations

from typing import Literal

from vime_hpc.config.section import PathText, Section


class ModelConfig(Section):
    """The policy: a Hugging Face directory with config.json, safetensors and tokenizer."""

    path: PathText
    """Directory (no hub name: compute nodes have no internet) of the initial policy and its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameter type in trainer and engine; float32 on a CPU for exactness."""
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """Packed attention kernel of the trainer: varlen needs CUDA; auto takes it where it is."""
