"""Rewards for tests: with a random policy a real verifier says 0 to everything, and nothing would be trained."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from vime_hpc.types import Prompt, Sample


async def share_of_ascii(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> float:
    """The share of response tokens below 128: about a half for a random byte-level policy, different in every sample."""
    del prompt, table
    response = sample.tokens[sample.prompt_length :]
    return float((response < 128).mean()) if len(response) else 0.0


async def unhurried_share_of_ascii(
    sample: Sample, prompt: Prompt, table: Mapping[str, Any]
) -> float:
    """The same after a second: a run that lasts long enough for a test to break something in it."""
    await asyncio.sleep(1.0)
    return await share_of_ascii(sample, prompt, table)
