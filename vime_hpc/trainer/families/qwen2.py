"""Qwen2.5: biases on query, key and value, no query or key norms."""

from __future__ import annotations

from vime_hpc.trainer.families.base import DecoderFamily

FAMILY = DecoderFamily(qkv_bias=True)
