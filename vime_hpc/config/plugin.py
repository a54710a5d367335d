"""Finding a user's function by its dotted path `pkg.module:name`. Needs no torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime_hpc.errors import ConfigError


def is_dotted(path: str) -> bool:
    """Whether the text names a user's object rather than a built-in one."""
    return ":" in path


def load_plugin(path: str, *, option: str) -> Callable[..., Any]:
    """The object a dotted path names.

    Args:
        path: `pkg.module:name`; `name` may have dots of its own (`Class.method`).
        option: the configuration key the path came from, for messages.
    Raises:
        ConfigError: the module or the name is not there, it is not callable, or its file belongs to
            another user (code of others is not run on a shared machine).
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f'{option} = "{path}" is not of the form "pkg.module:name"')
    refuse_foreign_module(module_name, option=option, path=path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise ConfigError(
                f'{option} = "{path}": {module_name} itself imports {error.name}, which is not '
                f"installed in {sys.executable}"
            ) from error
        raise ConfigError(
            f'{option} = "{path}": there is no module {error.name} on the import path of '
            f"{sys.executable}. Install its package there, or put its directory into PYTHONPATH"
        ) from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(n for n in vars(found) if not n.startswith("_")) or "nothing"
            raise ConfigError(f'{option} = "{path}": {module_name} has no {part}; it has {public}')
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f'{option} = "{path}" is a {type(found).__name__}, not something to call')
    result: Callable[..., Any] = found
    return result


def refuse_foreign_module(module_name: str, *, option: str, path: str) -> None:
    """Look at the owner of the module's file, and of its packages' files, before any of them runs.

    Args:
        path: what the configuration says, for the message.
    Raises:
        ConfigError: a file belongs to another user.
    """
    parts = module_name.split(".")
    for name in (".".join(parts[: i + 1]) for i in range(len(parts))):
        if name in sys.modules:
            continue  # it ran already, for whoever imported it
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            return  # the import itself says what is missing
        if spec is None or not spec.origin or not Path(spec.origin).exists():
            continue
        owner = Path(spec.origin).stat().st_uid
        if hasattr(os, "getuid") and owner not in (0, os.getuid()):
            raise ConfigError(
                f'{option} = "{path}": {spec.origin} belongs to user id {owner}, this process to '
                f"{os.getuid()}; code of other users is not run. Copy the file to a directory of yours"
            )
