"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3 with every MLP a mixture of experts."""

from __future__ import annotations

from vime_hpc.trainer.families.base import DecoderFamily

FAMILY = DecoderFamily(qk_norm=True, moe=True)
