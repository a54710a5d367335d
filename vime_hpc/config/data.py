"""[data]: prompts and their answers."""

from __future__ import annotations

from pydantic import PositiveInt

from vime_hpc.config.section import PathText, Section


class DataConfig(Section):
    """Prompt sets in JSONL (or Parquet): one record a prompt."""

    train: PathText
    """Path of the training prompts."""
    eval: PathText = ""
    """Path of the held-out prompts; empty = no evaluation."""
    prompt_key: str = "prompt"
    """Field with the prompt: a string, or a list of {role, content}."""
    label_key: str = "label"
    """Field with what the verifier compares with."""
    apply_chat_template: bool = True
    """Render the prompt through the tokenizer's chat template (a string becomes one user message)."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are left out, and counted."""
    shuffle: bool = True
    """A new permutation every epoch, from run.seed and the epoch number."""
    skip_bad_lines: bool = False
    """Leave out lines that are not valid records, saying how many, instead of refusing the file."""
