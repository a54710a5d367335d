"""The base class of every configuration section."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, refuses unknown keys and implicit type conversion; the string under a field is its documentation."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )


def _expanded(path: str) -> str:
    """`~` as a shell has it: bash leaves --run.dir=~/x as it is, and so does TOML."""
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise ValueError(f"{path} begins with the name of a user who is not known here")
    return found


PathText = Annotated[str, AfterValidator(_expanded)]
"""A path on the machine that reads the configuration; `~` is kept expanded."""
