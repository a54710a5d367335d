"""Writes docs/config.md from the configuration's own field strings: python tools/config_reference.py [--check]"""

from __future__ import annotations

import sys
import typing
from pathlib import Path

from pydantic.fields import FieldInfo

from vime_hpc.config.section import Section
from vime_hpc.config.tree import RunConfig

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
HEAD = """# Configuration

Generated from the field strings by `python tools/config_reference.py`; do not edit.

A run is described by TOML files, merged left to right (tables key by key; where a later file names another
function, the earlier one's table, as `reward_table`, is dropped), and overrides: `vime-hpc run A.toml B.toml --trainer.tp=2`.
vLLM's own server options go into `[vllm]` (or `--vllm-OPTION=value`), vllm-router's into `[router]` (or
`--router-OPTION=value`), under their own names without the leading dashes; they are checked against the installed
programs. `--dry-run` prints the resolved tree, `RUN/config.json` keeps it. Paths of `[run]`,
`[model]` and `[data]` may begin with `~`.
"""


def main() -> int:
    text = render()
    if "--check" in sys.argv:
        if PAGE.read_text() == text:
            return 0
        print(f"{PAGE} is not up to date: python tools/config_reference.py", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            parts.append(_heading(f"## [{name}]", section))
            parts += [
                _row(option, option_field) for option, option_field in section.model_fields.items()
            ]
            parts += _tables_of_tables(name, section)
        else:
            parts.append(f"\n## [{name}]\n\n{field.description}\n")
    return "".join(parts)


def _heading(title: str, section: type[Section]) -> str:
    return (
        f"\n{title}\n\n{(section.__doc__ or '').strip()}\n\n| option | type | default | meaning |\n"
        f"|---|---|---|---|\n"
    )


def _tables_of_tables(name: str, section: type[Section]) -> list[str]:
    """An option that holds tables under names of the user's own, as [cluster.components.NAME]."""
    parts = []
    for option, field in section.model_fields.items():
        inner = (typing.get_args(field.annotation) or (None,))[-1]
        if isinstance(inner, type) and issubclass(inner, Section):
            parts.append(_heading(f"### [{name}.{option}.NAME]", inner))
            parts += [_row(key, value) for key, value in inner.model_fields.items()]
    return parts


def _row(name: str, field: FieldInfo) -> str:
    default = (
        "(required)"
        if field.is_required()
        else f"`{field.get_default(call_default_factory=True)!r}`"
    )
    meaning = (field.description or "").replace("\n", " ").replace("|", "\\|")
    return f"| `{name}` | {_type(field.annotation)} | {default} | {meaning} |\n"


def _type(annotation: typing.Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " \\| ".join(str(value) for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Annotated:
        return _type(typing.get_args(annotation)[0])
    arguments = [a for a in typing.get_args(annotation) if a is not type(None)]
    if type(None) in typing.get_args(annotation):
        return f"{_type(arguments[0])} or none"
    return (
        str(getattr(annotation, "__name__", annotation))
        if not arguments
        else str(annotation).replace("typing.", "")
    )


if __name__ == "__main__":
    sys.exit(main())
