"""A plain tree as TOML text: how the batch script carries its configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(tree: Mapping[str, Any], at: tuple[str, ...] = ()) -> str:
    """A plain tree as TOML, tables after values; what tomllib reads back is the tree (None is left out)."""
    lines = [
        f"{_key(name)} = {_toml_value(value)}"
        for name, value in tree.items()
        if not isinstance(value, Mapping) and value is not None
    ]
    blocks = ["\n".join(lines)] if lines else []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            inner = toml_text(value, (*at, name))
            own = any(not isinstance(v, Mapping) for v in value.values()) or not value
            header = f"[{'.'.join(_key(part) for part in (*at, name))}]\n" if own else ""
            blocks.append(header + inner)
    return "\n".join(blocks)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    return repr(value)
