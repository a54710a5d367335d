"""Qwen3, dense: query and key norms, no biases, tied or untied embeddings."""

from __future__ import annotations

from vime_hpc.trainer.families.base import DecoderFamily

FAMILY = DecoderFamily(qk_norm=True)
