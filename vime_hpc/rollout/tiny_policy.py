"""Makes a Qwen3 policy small enough to train on a CPU, in Hugging Face form, with a byte-level
tokenizer.

For the quickstart and for tests: random weights, every part otherwise like the large ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
"""Ids 256, 257, ...; <|end|> ends a turn and is the tokenizer's eos_token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""One token around each message, no white space: on a CPU every token of a prompt costs."""


@dataclass(frozen=True, slots=True)
class TinyPolicy:
    """Sizes of the policy; hidden and intermediate must be multiples of 32 for vLLM's CPU
    kernels.
    """

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 384
    max_position: int = 2048
    tie_embeddings: bool = False
    initializer_range: float = 0.02
    rope_theta: float = 10_000.0
    experts: int = 0
    """0 = dense; else a Qwen3-MoE policy with so many experts of `intermediate` size."""
    experts_per_token: int = 2
    vocab_multiple: int = 32
    """The vocabulary (256 bytes and the special tokens) is padded to a multiple of this."""
    seed: int = 1

    @property
    def vocab_size(self) -> int:
        used = 256 + len(SPECIAL_TOKENS)
        return -(-used // self.vocab_multiple) * self.vocab_multiple


def byte_tokenizer() -> Any:
    """A transformers tokenizer whose ids 0..255 are the bytes, with the special tokens and the chat
    template above.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = _byte_letters()
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_policy(path: str | Path, sizes: TinyPolicy) -> int:
    """Write config.json, safetensors and the tokenizer to `path`; returns the number of parameters.

    The same sizes and seed give the same bytes.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging as hf_logging

    tokenizer = byte_tokenizer()
    common: dict[str, Any] = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate,
        "max_position_embeddings": sizes.max_position,
        "tie_word_embeddings": sizes.tie_embeddings,
        "initializer_range": sizes.initializer_range,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rope_theta},
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "dtype": "float32",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        if sizes.experts:
            config = Qwen3MoeConfig(
                **common,
                num_experts=sizes.experts,
                num_experts_per_tok=sizes.experts_per_token,
                moe_intermediate_size=sizes.intermediate,
                norm_topk_prob=True,
            )
            model = Qwen3MoeForCausalLM(config).float()
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**common)).float()
    hf_logging.disable_progress_bar()  # of one file of 4 MB
    model.save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return sum(int(p.numel()) for p in model.parameters())


def _byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte, in byte order (GPT-2's
    table).
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + sum(b not in plain for b in range(byte))))
    return [letters[byte] for byte in range(256)]
