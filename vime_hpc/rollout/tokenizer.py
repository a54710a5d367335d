"""Text to token ids and back, through the policy's own Hugging Face tokenizer.

Token ids are the truth of a run; text is made from them for verifiers and for reading, and never
encoded again. Imports transformers only when a tokenizer is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vime_hpc.errors import ConfigError
from vime_hpc.types import TokenArray

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptTokenizer:
    """A Hugging Face tokenizer with the three rules this project keeps about it.

    A rendered chat template is encoded without adding special tokens; a plain text with them; and a
    prompt never starts with two BOS tokens, whoever wrote the second.
    """

    hf: Any
    """transformers.PreTrainedTokenizerBase."""

    @property
    def eos_token_id(self) -> int:
        """The token that ends a response."""
        if self.hf.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer {self.hf.name_or_path} has no eos_token; responses could never "
                f"end. Set eos_token in its tokenizer_config.json"
            )
        return int(self.hf.eos_token_id)

    def render(self, messages: Messages, **options: Any) -> str:
        """The chat template's text for these messages, ready for the response."""
        if not self.hf.chat_template:
            raise ConfigError(
                f"data.apply_chat_template is on, but the tokenizer {self.hf.name_or_path} has no "
                f"chat_template; add one or set data.apply_chat_template = false"
            )
        arguments = {"add_generation_prompt": True, **options}
        return str(self.hf.apply_chat_template(messages, tokenize=False, **arguments))

    def encode_rendered(self, text: str) -> TokenArray:
        """[T] ids of a rendered template: nothing is added, a doubled BOS is made one."""
        return self._one_bos(self.hf.encode(text, add_special_tokens=False))

    def encode_plain(self, text: str) -> TokenArray:
        """[T] ids of a prompt without a template: with the tokenizer's own BOS, once."""
        return self._one_bos(self.hf.encode(text, add_special_tokens=True))

    def encode_continuation(self, text: str) -> TokenArray:
        """[R] ids of a text that follows a prompt: no special tokens."""
        return np.asarray(self.hf.encode(text, add_special_tokens=False), dtype=np.int32)

    def num_leading_bos(self, text: str) -> int:
        """How many BOS tokens a rendered text starts with, before they are made one."""
        bos = self.hf.bos_token_id
        ids = self.hf.encode(text, add_special_tokens=False)
        count = 0
        while bos is not None and count < len(ids) and ids[count] == bos:
            count += 1
        return count

    def decode(self, tokens: Sequence[int] | TokenArray) -> str:
        """Text without special tokens."""
        ids = [int(t) for t in tokens]
        return str(self.hf.decode(ids, skip_special_tokens=True))

    def _one_bos(self, ids: Sequence[int]) -> TokenArray:
        bos = self.hf.bos_token_id
        start = 0
        while bos is not None and len(ids) > start + 1 and ids[start] == bos == ids[start + 1]:
            start += 1
        return np.asarray(ids[start:], dtype=np.int32)


def load_tokenizer(model_dir: str | Path) -> PromptTokenizer:
    """The tokenizer of a model directory.

    Raises:
        ConfigError: no such directory, or transformers cannot load a tokenizer from it.
    """
    path = Path(model_dir)
    if not path.is_dir():
        raise ConfigError(
            f"model.path = {path}: there is no such directory. It must hold config.json, the "
            f"tokenizer and the weights; vime-hpc data model --out {path} makes a tiny one"
        )
    from transformers import AutoTokenizer  # seconds of import: only where a tokenizer is needed

    try:
        hf = AutoTokenizer.from_pretrained(str(path), use_fast=True, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: no tokenizer can be loaded ({error}); the directory needs "
            f"tokenizer.json and tokenizer_config.json"
        ) from error
    return PromptTokenizer(hf)
