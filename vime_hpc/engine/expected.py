"""Which slices vLLM's tensor and expert parallel ranks hold of the models the trainer knows: what `vime-hpc plan` shows before a
run. A run goes by what was recorded of vLLM's loader (engine/reads.py); a test holds the two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from vime_hpc.errors import ConfigError
from vime_hpc.weights.engine_layout import EngineLayout, RankLayout, Slice
from vime_hpc.weights.plan import DTYPE_BYTES

Shape = tuple[int, ...]
_VOCABULARY = re.compile(r"(model\.embed_tokens|lm_head)\.weight")
_VOCABULARY_MULTIPLE = 64  # vLLM fills the vocabulary up to it
_ROWS = re.compile(r".*\.(q|gate|up)_proj\.(weight|bias)")
_KEY_VALUE = re.compile(r".*\.(k|v)_proj\.(weight|bias)")
_COLUMNS = re.compile(r".*\.(o|down)_proj\.weight")
_EXPERT = re.compile(r".*\.experts\.(\d+)\..*")


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How engines cut the model. expert_parallel: [vllm] enable-expert-parallel."""

    num_engines: int
    tp: int
    expert_parallel: bool = False


def expected_layout(
    shapes: Mapping[str, Shape], hf: Mapping[str, Any], engines: EngineShape, dtype: str
) -> EngineLayout:
    """What every engine rank holds.

    Args:
        shapes: by Hugging Face name (without a tied head). hf: config.json. dtype: of the parameters.
    Raises:
        ConfigError: engine.tp does not divide a dimension it cuts.
    """
    ranks = [_rank_layout(shapes, hf, engines, rank, dtype) for rank in range(engines.tp)]
    return EngineLayout.of_ranks(ranks * engines.num_engines)


def _rank_layout(
    shapes: Mapping[str, Shape], hf: Mapping[str, Any], engines: EngineShape, rank: int, dtype: str
) -> RankLayout:
    slices, held = {}, 0
    for name, shape in shapes.items():
        found = _slice(name, shape, hf, engines, rank)
        if found.shape != shape:
            slices[name] = found
        in_memory = found.shape
        if _VOCABULARY.fullmatch(name):
            in_memory = (_vocabulary_rows(shape[0], engines.tp), *shape[1:])
        held += prod(in_memory) * DTYPE_BYTES[dtype]
    return RankLayout(slices, held)


def _slice(
    name: str, shape: Shape, hf: Mapping[str, Any], engines: EngineShape, rank: int
) -> Slice:
    tp = engines.tp
    if _VOCABULARY.fullmatch(name):
        rows = _vocabulary_rows(shape[0], tp)
        here = min(rows, max(0, shape[0] - rank * rows))
        return _along(shape, 0, rank * rows, here)
    expert = _EXPERT.fullmatch(name)
    if expert is not None and engines.expert_parallel:
        experts = int(hf.get("num_experts") or hf["num_local_experts"])
        own = int(expert[1]) // _share(name, experts, tp) == rank
        return _along(shape, 0, 0, shape[0] if own else 0)
    if _KEY_VALUE.fullmatch(name):
        heads = int(hf.get("num_key_value_heads") or hf["num_attention_heads"])
        groups = min(heads, tp)  # with more ranks than heads several hold the same one
        size = _share(name, shape[0], groups)
        return _along(shape, 0, rank * groups // tp * size, size)
    for pattern, dimension in ((_ROWS, 0), (_COLUMNS, 1)):
        if pattern.fullmatch(name):
            size = _share(name, shape[dimension], tp)
            return _along(shape, dimension, rank * size, size)
    return Slice((0,) * len(shape), shape)


def _along(shape: Shape, dimension: int, start: int, size: int) -> Slice:
    """The slice of one dimension, all of the others; all zeros where nothing is left."""
    if size == 0:
        return Slice((0,) * len(shape), (0,) * len(shape))
    starts, sizes = [0] * len(shape), list(shape)
    starts[dimension], sizes[dimension] = start, size
    return Slice(tuple(starts), tuple(sizes))


def _vocabulary_rows(vocabulary: int, tp: int) -> int:
    padded = -(-vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return _share("the vocabulary", padded, tp)


def _share(what: str, size: int, parts: int) -> int:
    if size % parts:
        raise ConfigError(
            f"engine.tp: {what} has {size} rows, columns or experts, which {parts} engine ranks cannot share evenly; "
            f"set engine.tp to a divisor"
        )
    return size // parts
