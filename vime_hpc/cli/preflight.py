"""What `run` and `submit` refuse before anything starts or is written: what can be seen not to work."""

from __future__ import annotations

import difflib
import inspect
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import vime_hpc
from vime_hpc.config.algorithm import ADVANTAGES, check_schedule
from vime_hpc.config.data import DataConfig
from vime_hpc.config.plugin import is_dotted, load_plugin
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError, PromptDataError
from vime_hpc.roles.schema import buffer_schema

PARAMETERS = {
    "rollout.reward": ("sample", "prompt", "table"),
    "rollout.generate": ("request", "index_in_group", "client", "table"),
    "rollout.filters": ("group", "table"),
    "algorithm.advantage": ("rewards", "group_ids", "rollout_ids", "usable", "table"),
}
"""What the function of an option is called with, in order (vime_hpc/protocols.py)."""
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.tiktoken")


def check(config: RunConfig, *, import_plugins: bool) -> None:
    """Refuse what can be seen not to work.

    Args:
        import_plugins: also import the functions named by dotted paths. Right where the ranks start on this machine;
            a login node may lack what the job's environment has.
    Raises:
        ConfigError: model directory, layout, schedule, names of functions, columns of the buffer, engine options.
        PromptDataError: a prompt file with a line that cannot be used.
    """
    from vime_hpc.trainer.layout import check_layout, read_hf_config

    model = read_hf_config(config.model.path)
    if config.run.mode != "rollout_only":
        check_layout(model, config.trainer)
        check_schedule(config.optimizer, config.run.num_steps * config.algorithm.updates_per_step)
    _check_model_files(Path(config.model.path), tokenizer=config.run.mode != "train_only")
    _check_names(config, import_plugins)
    if config.run.mode == "train_only":
        return
    buffer_schema(config)
    for path in filter(None, (config.data.train, config.data.eval)):
        _check_prompts(path, config.data)
    from vime_hpc.engine.passthrough import check_router, check_vllm

    check_vllm(config.vllm)
    check_router(config.router)


def keep_foreign_modules_out() -> None:
    """The ranks must not import from the current directory, where they look for the user's modules, if everybody may
    write to it (/tmp), or if it is another checkout: its vime_hpc would run where ours is not installed.
    """
    shared = Path.cwd().stat().st_mode & stat.S_IWOTH
    package = Path("vime_hpc")
    other = package.is_dir() and not package.samefile(Path(vime_hpc.__file__).parent)
    if shared or other:
        os.environ["PYTHONSAFEPATH"] = "1"


def _check_model_files(directory: Path, *, tokenizer: bool) -> None:
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"model.path = {str(directory)!r} has no *.safetensors; it holds {_names(directory)}. Copy the whole model "
            f"directory (weights in other formats are not read)"
        )
    if tokenizer and not any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ConfigError(
            f"model.path = {str(directory)!r} has no tokenizer (tokenizer.json, tokenizer_config.json); it holds "
            f"{_names(directory)}. Copy the tokenizer's files beside the weights"
        )


def _names(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _check_names(config: RunConfig, import_plugins: bool) -> None:
    """Built-in names are known ones; dotted paths lead to something callable."""
    from vime_hpc.rollout.filters import BUILT_IN as FILTERS
    from vime_hpc.rollout.rewards.verifiers import BUILT_IN as REWARDS

    generates = config.run.mode != "train_only" and config.algorithm.loss != "sft"
    trains_on_rewards = config.run.mode != "rollout_only" and config.algorithm.loss != "sft"
    named: list[tuple[str, str, Iterable[str]]] = []
    if trains_on_rewards:
        named.append(("algorithm.advantage", config.algorithm.advantage, ADVANTAGES))
    if generates:
        named.append(("rollout.reward", config.rollout.reward, REWARDS))
        named.append(("rollout.generate", config.rollout.generate, ()))
    if config.algorithm.loss != "sft":
        named += [("rollout.filters", name, FILTERS) for name in config.rollout.filters]
    for option, name, known in named:
        if not is_dotted(name):
            _check_known(option, name, list(known))
        elif import_plugins:
            with _import_path_of_ranks():
                _check_parameters(option, name, load_plugin(name, option=option))


def _check_parameters(option: str, name: str, function: Callable[..., Any]) -> None:
    """Whether it can be called as it will be; a reward that cannot would make every sample unusable."""
    given = PARAMETERS[option]
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # of a C function; nothing is known
    try:
        signature.bind(*given)
    except TypeError as error:
        raise ConfigError(
            f'{option} = "{name}" takes {signature}, and is called with ({", ".join(given)}): {error}. '
            f"See docs/extending.md"
        ) from None


def _check_known(option: str, name: str, known: list[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    built_in = f"built in are {', '.join(known)}, and a" if known else "a"
    raise ConfigError(
        f'{option} = "{name}" is unknown{f"; did you mean {near[0]}?" if near else ""}; {built_in} dotted path '
        f'"pkg.module:name" names your own (docs/extending.md)'
    )


@contextmanager
def _import_path_of_ranks() -> Iterator[None]:
    """Ranks look in the current directory too, after everywhere else; this command's script does not."""
    if os.environ.get("PYTHONSAFEPATH") or os.getcwd() in sys.path:
        yield
        return
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path.remove(os.getcwd())


def _check_prompts(path: str, data: DataConfig) -> None:
    """Every line of a prompt file, without tokenizing: what would stop the rollout worker later stops us now."""
    from vime_hpc.rollout.prompt_file import read_prompt_file
    from vime_hpc.rollout.source import check_record

    for line, record in read_prompt_file(path, skip_bad_lines=data.skip_bad_lines).records:
        try:
            check_record(record, data)
        except PromptDataError as error:
            if data.skip_bad_lines:
                continue
            wrong_key = data.prompt_key not in record
            kind = ConfigError if wrong_key else PromptDataError
            raise kind(f"{path}, line {line}: {error}") from error
