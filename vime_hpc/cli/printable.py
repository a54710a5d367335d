"""Text of models and of other programs on its way to a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Model text that cannot drive the terminal: control characters and lone surrogates in backslash form."""
    return "".join(
        char
        if char in "\n\t" or char.isprintable()
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
