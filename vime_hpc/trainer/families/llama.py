"""Llama 3: no biases, no query or key norms, llama3 rope scaling."""

from __future__ import annotations

from vime_hpc.trainer.families.base import DecoderFamily

FAMILY = DecoderFamily()
