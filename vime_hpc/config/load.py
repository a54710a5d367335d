"""TOML files and command-line overrides to one frozen RunConfig; wrong keys and types are told by name.

Files merge left to right, then overrides, last wins. `--section.option=value` takes a TOML value (a bare word is a
string); `--vllm-OPTION[=value]` and `--router-OPTION[=value]` fill the [vllm] and [router] tables.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from vime_hpc.config.section import Section
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError

PASSTHROUGH = ("vllm", "router")
HOW = {
    "list_type": """a list, as in '["one", "two"]'""",
    "dict_type": "a table, as in '{ name = 1 }'",
    "bool_type": "true or false",
}
Sources = dict[tuple[str, ...], str]


def load_config(files: Iterable[Path], overrides: Iterable[str] = ()) -> RunConfig:
    """Read, merge and check a run's configuration.

    Raises:
        ConfigError: a file is missing or no TOML, an override is malformed, a key is unknown (the nearest is named),
            a value has the wrong type or range, or two sections contradict each other.
    """
    tree: dict[str, Any] = {}
    sources: Sources = {}
    for path in files:
        _merge(tree, _read_toml(path), sources, str(path))
    _override(tree, overrides, sources)
    return build_config(tree, sources)


def build_config(tree: Mapping[str, Any], sources: Sources | None = None) -> RunConfig:
    """A RunConfig from a plain tree; errors name the option and where it was set."""
    try:
        return RunConfig.model_validate(dict(tree))
    except ValidationError as error:
        lines = [_explain(dict(e), sources or {}) for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def go_on_with(
    config: RunConfig, cluster: Iterable[Path], overrides: Iterable[str] = ()
) -> RunConfig:
    """A run's configuration with another machine's file in place of its [cluster], and overrides over it.

    Raises:
        ConfigError: as load_config.
    """
    tree = config.model_dump(mode="json")
    sources: Sources = {}
    for path in cluster:
        tree["cluster"] = {}
        _merge(tree, _read_toml(path), sources, str(path))
    _override(tree, overrides, sources)
    return build_config(tree, sources)


def read_resolved(path: Path) -> RunConfig:
    """The configuration a run directory was started with (RUN/config.json).

    Options that the version which wrote it had and this one has no more are left out: they do nothing.
    """
    try:
        return build_config(_known_options(json.loads(path.read_text())))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is not there: {path.parent} is not a run directory of vime-hpc"
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}); the run directory was changed by hand"
        ) from None


def _known_options(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree without what no option of this version is called."""
    try:
        RunConfig.model_validate(tree)
    except ValidationError as error:
        for problem in error.errors():
            if problem["type"] == "extra_forbidden":
                *path, last = problem["loc"]
                table: Any = tree
                for key in path:
                    table = table[key]
                del table[last]
    return tree


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`--trainer.tp=2` to (("trainer", "tp"), 2); `--vllm-max-num-seqs=8` to (("vllm", "max-num-seqs"), 8)."""
    if not text.startswith("--"):
        raise ConfigError(
            f"{text!r} is neither a configuration file nor an override; overrides look like "
            f"--section.option=value"
        )
    name, equals, raw = text[2:].partition("=")
    for table in PASSTHROUGH:
        if name.startswith(f"{table}-"):
            return (table, name[len(table) + 1 :]), (_toml_value(raw) if equals else True)
    keys = tuple(part.replace("-", "_") for part in name.split("."))
    if not equals:
        raise ConfigError(f"{text}: give the value after an equals sign, as in {text}=VALUE")
    if len(keys) < 2:
        near = _nearest(keys[0], _all_options())
        raise ConfigError(
            f"{text}: options are written --section.option=value"
            + (f"; did you mean --{near}?" if near else "")
        )
    return keys, (raw if _wants_text(keys) else _toml_value(raw))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such configuration file (recipes are in configs/recipes/)"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name a TOML file in it") from None
    except PermissionError:
        raise ConfigError(f"{path} cannot be read by you; chmod it, or copy it") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _merge(
    tree: dict[str, Any],
    new: Mapping[str, Any],
    sources: Sources,
    name: str,
    at: tuple[str, ...] = (),
) -> None:
    for key in [key for key in new if key in tree and new[key] != tree[key]]:
        if f"{key}_table" in tree:  # it was for the function that this file replaces
            del tree[f"{key}_table"]
            for inside in [
                where for where in sources if where[: len(at) + 1] == (*at, f"{key}_table")
            ]:
                del sources[inside]
    for key, value in new.items():
        here = (*at, key)
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value, sources, name, here)
        elif isinstance(value, Mapping):
            tree[key] = {}
            _merge(tree[key], value, sources, name, here)
        else:
            tree[key] = value
            sources[here] = f"in {name}"


def _override(tree: dict[str, Any], overrides: Iterable[str], sources: Sources) -> None:
    for text in overrides:
        keys, value = parse_override(text)
        _set(tree, keys, value)
        for inside in [where for where in sources if where[: len(keys)] == keys]:
            del sources[inside]
        sources[keys] = "on the command line"


def _set(tree: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--{'.'.join(keys)}: {key} is an option, not a section")
    tree[keys[-1]] = value


def _toml_value(raw: str) -> Any:
    try:
        return tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return raw


def _field(keys: tuple[str, ...]) -> Any:
    model: type[BaseModel] = RunConfig
    annotation: Any = None
    for key in keys:
        if (
            get_origin(model) is dict
        ):  # tables under names of the user's own: cluster.components.NAME
            annotation = get_args(model)[1]
        elif isinstance(model, type) and issubclass(model, BaseModel) and key in model.model_fields:
            annotation = model.model_fields[key].annotation
        else:
            return None
        model = annotation
    return annotation


def _wants_text(keys: tuple[str, ...]) -> bool:
    """Text options take the raw word, so --run.dir=7 and --model.path=1e6 need no quotes."""
    annotation = _field(keys)
    if get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in get_args(annotation))
    return annotation is str


def _all_options() -> list[str]:
    return [
        f"{name}.{option}"
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        for option in field.annotation.model_fields
    ]


def _nearest(word: str, choices: Iterable[str]) -> str | None:
    choices = list(choices)
    tails = {choice.rpartition(".")[2]: choice for choice in choices}
    found = difflib.get_close_matches(word, [*choices, *tails], n=1, cutoff=0.5)
    return tails.get(found[0], found[0]) if found else None


def _explain(error: dict[str, Any], sources: Sources) -> str:
    keys = tuple(str(part) for part in error["loc"])
    name = ".".join(keys) or "configuration"
    source = _source(keys, sources)
    given = error.get("input")
    if error["type"] == "extra_forbidden":
        table = _field(keys[:-1]) if len(keys) > 2 else None
        if isinstance(table, type) and issubclass(table, BaseModel):
            near = _nearest(name, [".".join((*keys[:-1], field)) for field in table.model_fields])
        else:
            near = _nearest(name, _all_options() if len(keys) > 1 else RunConfig.model_fields)
        return f"{name} is no {'option' if len(keys) > 1 else 'section'}{source}" + (
            f"; did you mean {near}?" if near else "; see docs/config.md"
        )
    if error["type"] == "missing":
        annotation = _field(keys)
        if isinstance(annotation, type) and issubclass(annotation, Section):
            name = ", ".join(
                f"{name}.{option}"
                for option, field in annotation.model_fields.items()
                if field.is_required()
            )
        return (
            f"{name} is required and not set; add it to a configuration file or give --{name}=VALUE"
        )
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        if isinstance(given, str):
            message = f"{name}: {message}"
        return message + (_sources_named(message, sources) or (source if keys in sources else ""))
    wanted = HOW.get(error["type"]) or str(error["msg"]).removeprefix("Input should be ")
    return f"{name} = {given!r}: expected {wanted}{source}"


def _source(keys: tuple[str, ...], sources: Sources) -> str:
    """Where one option was set: its own entry, that of a table around it, or of anything inside it."""
    for where, name in sources.items():
        if where[: len(keys)] == keys or keys[: len(where)] == where:
            return f" (set {name})"
    return ""


def _sources_named(message: str, sources: Sources) -> str:
    """Where the options that a message about several of them names were set."""
    named = {".".join(where): name for where, name in sources.items()}
    found = [
        f"{option} is set {name}"
        for option, name in named.items()
        if re.search(rf"(?<![\w.]){re.escape(option)}(?![\w.])", message)
    ]
    return f" ({', '.join(found)})" if found else ""
