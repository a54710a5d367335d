"""Values of the columns that are not plain numbers: texts, JSON, sets of token ids, digests of images.

`Sample.columns` holds arrays only, since every change of a sample's length works on arrays; these make and read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vime_hpc.buffer.schema import canonical_json
from vime_hpc.types import Sample

AnyArray = npt.NDArray[Any]
_NO_TEXT = np.frombuffer(b"", dtype=np.uint8)
IMAGE_DIGEST = re.compile(r"xxh3_128:[0-9a-f]{32}|sha256:[0-9a-f]{64}")


def encode_text(text: str) -> AnyArray:
    """UTF-8 bytes; lone surrogates, which models do emit through byte tokens, pass through (surrogatepass)."""
    if not text:
        return _NO_TEXT
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)


def decode_text(data: AnyArray) -> str:
    return bytes(data).decode("utf-8", "surrogatepass")


def encode_json(value: Any) -> AnyArray:
    """[bytes] uint8: canonical JSON, for `columns["trace"]` and `columns["image_digests"]`.

    Raises:
        TypeError, ValueError: not plain JSON; NaN is not.
    """
    return np.frombuffer(canonical_json(value), dtype=np.uint8)


def decode_json(data: AnyArray) -> Any:
    """The value that encode_json stored. Raises ValueError when the bytes are not UTF-8 JSON or hold NaN."""
    return json.loads(bytes(data).decode("utf-8"), parse_constant=_refuse)


def image_digest(image: bytes) -> str:
    """What `image_digests` lists for an encoded image (the bytes of the PNG or JPEG file)."""
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(image)}"


def nucleus_columns(nuclei: Sequence[Sequence[int] | AnyArray]) -> dict[str, AnyArray]:
    """The two columns that hold one set of token ids per response token; () where the engine sampled nothing."""
    edges = np.zeros(len(nuclei) + 1, dtype=np.int64)
    np.cumsum([len(nucleus) for nucleus in nuclei], out=edges[1:])
    empty = np.zeros(0, dtype=np.int64)
    members = np.concatenate([empty, *(np.asarray(nucleus, np.int64) for nucleus in nuclei)])
    fits = not members.size or members.max() <= np.iinfo(np.int32).max  # else the write refuses it
    return {
        "top_p_token_offsets": edges,
        "top_p_token_ids": members.astype(np.int32) if fits else members,
    }


def nuclei_of(sample: Sample) -> list[AnyArray] | None:
    """[R] arrays of the token ids the nucleus kept; None where the sample does not say."""
    if "top_p_token_ids" not in sample.columns:
        return None
    return np.split(sample.columns["top_p_token_ids"], sample.columns["top_p_token_offsets"][1:-1])[
        : sample.response_length
    ]


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
