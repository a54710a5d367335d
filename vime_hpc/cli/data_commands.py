"""What `vime-hpc data make | model | check` do."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import os
import shutil
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from vime_hpc.config.data import DataConfig
from vime_hpc.config.rollout import RolloutConfig
from vime_hpc.errors import ConfigError, VimeError
from vime_hpc.rollout.generate import failed_sample
from vime_hpc.rollout.rewards.runner import RewardRunner
from vime_hpc.rollout.source import PromptSet, load_prompts
from vime_hpc.rollout.tiny_policy import TinyPolicy, make_tiny_policy
from vime_hpc.rollout.tokenizer import PromptTokenizer, load_tokenizer
from vime_hpc.types import GroupRequest, Prompt, Sample, Status

ABOUT = "about.json"
ARITHMETIC: Mapping[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
TRIES_PER_PROMPT = 50
"""Entries drawn per prompt wanted before a task counts as having too few different prompts."""

LABEL_FORMS: Mapping[str, Sequence[str]] = {
    "exact": ("{}",),
    "reasoning_gym": ("{}", "<answer>{}</answer>"),
    "math": ("\\boxed{{{}}}", "So the result is $\\boxed{{{}}}$."),
    "dapo": ("Answer: ${}$", "Answer: {}", "\\boxed{{{}}}"),
    "f1": ("{}", "Answer: {}"),
}
"""Responses a verifier must give full marks, with the label in place of {}."""


def make(arguments: argparse.Namespace) -> int:
    """Write train.jsonl and eval.jsonl of a reasoning-gym task."""
    if arguments.num_train < 1 or arguments.num_eval < 0:
        raise ConfigError(
            f"--num-train {arguments.num_train} and --num-eval {arguments.num_eval}: at least one training prompt is needed"
        )
    options = {
        **(ARITHMETIC if arguments.task == "arithmetic" else {}),
        **_pairs(arguments.task_option),
    }
    about = {
        "task": arguments.task,
        "task_options": options,
        "num_train": arguments.num_train,
        "num_eval": arguments.num_eval,
        "seed": arguments.seed,
        "prompt_format": arguments.prompt_format,
        "strip_spaces": arguments.strip_spaces,
    }
    out = Path(arguments.out)
    made = not _already_there(out, about, ("train.jsonl", "eval.jsonl"), arguments.force)
    if made:
        records = _distinct_records(arguments, options)
        wanted = arguments.num_train + arguments.num_eval
        chosen = [record for record, _ in zip(records, range(wanted), strict=False)]
        if len(chosen) < wanted:
            raise ConfigError(
                f"task {arguments.task} with {options} has only {len(chosen)} different prompts in {wanted * TRIES_PER_PROMPT} "
                f"draws, {wanted} are wanted; allow more digits or terms (--task-option), or ask for fewer prompts"
            )
        _make_directory(out)
        # Mixed before the split: easy prompts run out first, so early draws are easier than late
        # ones.
        order = np.random.Generator(np.random.PCG64(arguments.seed)).permutation(wanted)
        chosen = [chosen[i] for i in order]
        _write_records(out / "eval.jsonl", chosen[: arguments.num_eval])
        _write_records(out / "train.jsonl", chosen[arguments.num_eval :])
        _write_text(out / ABOUT, json.dumps(about, indent=1, sort_keys=True))
    result = {"dir": str(out), "made": made, **about}
    _report(arguments, result, [
        f"{out}/train.jsonl: {arguments.num_train} prompts; {out}/eval.jsonl: {arguments.num_eval} held-out prompts"
        + ("" if made else " (already there, unchanged)")])  # fmt: skip
    return 0


def model(arguments: argparse.Namespace) -> int:
    """Write a tiny policy in Hugging Face form."""
    names = TinyPolicy.__dataclass_fields__
    sizes = TinyPolicy(**{name: getattr(arguments, name) for name in names})
    _check_sizes(sizes)
    out = Path(arguments.out)
    made = not _already_there(
        out, asdict(sizes), ("config.json", "model.safetensors"), arguments.force
    )
    parameters: int | None = None
    if made:
        _make_directory(out)
        parameters = make_tiny_policy(out, sizes)
        _write_text(out / ABOUT, json.dumps(asdict(sizes), indent=1, sort_keys=True))
    result = {"dir": str(out), "made": made, "num_parameters": parameters, **asdict(sizes)}
    size = f"{parameters:,} parameters" if parameters else "already there, unchanged"
    _report(arguments, result, [f"{out}: {size}, vocabulary of {sizes.vocab_size}"])
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Read a prompt file as a run would; 3 where something is wrong with it."""
    data = DataConfig(
        train=arguments.file,
        prompt_key=arguments.prompt_key,
        label_key=arguments.label_key,
        apply_chat_template=not arguments.no_chat_template,
        max_prompt_tokens=arguments.max_prompt_tokens,
        skip_bad_lines=arguments.skip_bad_lines,
    )
    tokenizer = load_tokenizer(arguments.model)
    prompts = load_prompts(arguments.file, data, tokenizer)
    result = _counts(prompts, tokenizer, data)
    problems: list[str] = []
    if result["num_double_bos"]:
        problems.append(f"{result['num_double_bos']} prompts start with more than one BOS (a run keeps one); take the BOS out "
                        f"of the chat template or the prompt texts")  # fmt: skip
    if arguments.reward:
        grades = asyncio.run(_grade_labels(prompts, arguments))
        result |= grades
        problems += [f"prompt {g['prompt_id']}: label {g['label']!r} as {g['response']!r} gets {g['reward']} {g['cause']}, read "
                     f"as {g['pred']!r}" for g in grades["not_full_marks"][:10]]  # fmt: skip
    result["problems"] = problems
    lines = [
        f"{key}: {value}"
        for key, value in result.items()
        if key not in ("problems", "not_full_marks")
    ]
    _report(arguments, result, [*lines, *(f"PROBLEM: {p}" for p in problems)])
    return 3 if problems else 0


def _counts(prompts: PromptSet, tokenizer: PromptTokenizer, data: DataConfig) -> dict[str, Any]:
    lengths = np.array([len(p.tokens) for p in prompts.prompts])
    texts = [p.text for p in prompts.prompts]
    doubled = (
        sum(tokenizer.num_leading_bos(text) > 1 for text in texts)
        if data.apply_chat_template
        else 0
    )
    return {
        "num_records": prompts.num_records,
        "num_prompts": len(prompts),
        "num_skipped_lines": prompts.num_skipped_lines,
        "num_too_long": prompts.num_too_long,
        "num_duplicates": len(texts) - len(set(texts)),
        "num_without_label": sum(p.label is None for p in prompts.prompts),
        "num_double_bos": doubled,
        "prompt_tokens_min": int(lengths.min()),
        "prompt_tokens_mean": float(lengths.mean()),
        "prompt_tokens_max": int(lengths.max()),
        "first_prompt": texts[0],
        "digest": prompts.digest,
    }


async def _grade_labels(prompts: PromptSet, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every label as a response, in each form the verifier accepts."""
    config = RolloutConfig(
        reward=arguments.reward,
        reward_key=arguments.reward_key,
        reward_table=_pairs(arguments.reward_table),
    )
    runner = RewardRunner(config)
    bad: list[dict[str, Any]] = []
    count = 0
    try:
        for prompt in prompts.prompts:
            for form in LABEL_FORMS.get(arguments.reward, ("{}",)):
                response = form.format(prompt.label)
                grade = await runner.grade(_as_sample(prompt, response), prompt)
                count += 1
                if grade.reward is None or grade.reward < 1.0:
                    pred = grade.details.get("verdict", {}).get("pred")
                    bad.append({"prompt_id": prompt.prompt_id, "label": prompt.label, "response": response, "pred": pred,
                                "reward": grade.reward, "cause": grade.cause})  # fmt: skip
    finally:
        runner.close()
    return {"num_labels_graded": count, "num_not_full_marks": len(bad), "not_full_marks": bad}


def _as_sample(prompt: Prompt, response: str) -> Sample:
    sample = failed_sample(GroupRequest(0, prompt, 1), 0, cause="", version=0)
    return replace(sample, status=Status.COMPLETED, response_text=response)


def _check_task(task: str) -> None:
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = ", ".join(difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4))
        nearest = f"; the nearest: {near}" if near else ""
        raise ConfigError(
            f"--task {task}: reasoning-gym has no such task{nearest}. All "
            f"{len(DATASETS)}: python -c 'from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))'"
        )


def _distinct_records(
    arguments: argparse.Namespace, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Records with different prompt texts, in the task's order."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ConfigError(
            "vime-hpc data make needs reasoning-gym: pip install reasoning-gym"
        ) from error
    task = "chain_sum" if arguments.task == "arithmetic" else arguments.task
    _check_task(task)
    draws = (arguments.num_train + arguments.num_eval) * TRIES_PER_PROMPT
    try:
        entries = reasoning_gym.create_dataset(task, seed=arguments.seed, size=draws, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"reasoning-gym task {task!r} with options {dict(options)}: {error}"
        ) from error
    seen: set[str] = set()
    for index in range(draws):
        entry = entries[index]
        prompt = _prompt_text(arguments, entry)
        if prompt in seen:
            continue
        seen.add(prompt)
        kept = {"answer": entry["answer"], "metadata": entry["metadata"]}
        yield {
            "prompt": prompt,
            "label": entry["answer"],
            "metadata": {"task": task, "entry": kept},
        }


def _prompt_text(arguments: argparse.Namespace, entry: Mapping[str, Any]) -> str:
    fields = {**entry["metadata"], "question": entry["question"], "answer": entry["answer"]}
    names = {name for _, name, _, _ in string.Formatter().parse(arguments.prompt_format) if name}
    missing = sorted(names - fields.keys())
    if missing:
        raise ConfigError(
            f"--prompt-format names {', '.join(missing)}; this task has {', '.join(sorted(fields))}"
        )
    text: str = arguments.prompt_format.format(**fields)
    return text.replace(" ", "") if arguments.strip_spaces else text


def _check_sizes(sizes: TinyPolicy) -> None:
    for name in ("hidden", "intermediate"):
        value = getattr(sizes, name)
        if value < 32 or value % 32:
            raise ConfigError(
                f"--{name} {value} is not a multiple of 32, which vLLM's CPU kernels need"
            )
    if sizes.heads % sizes.kv_heads:
        raise ConfigError(f"--heads {sizes.heads} is not a multiple of --kv-heads {sizes.kv_heads}")
    if sizes.experts and sizes.experts_per_token > sizes.experts:
        raise ConfigError(
            f"--experts-per-token {sizes.experts_per_token} is more than --experts {sizes.experts}"
        )


def _already_there(out: Path, about: Mapping[str, Any], files: Sequence[str], force: bool) -> bool:
    """Whether `out` holds just this; refuses to write over something else.

    Raises:
        ConfigError: there is something else, and no --force.
    """
    present = [name for name in (*files, ABOUT) if (out / name).exists()]
    if not present or force:
        return False
    same = len(present) == len(files) + 1 and json.loads((out / ABOUT).read_text()) == json.loads(
        json.dumps(about)
    )
    if not same:
        raise ConfigError(f"{out} already holds {', '.join(present)}, made with other options or incomplete; choose another "
                          f"--out, or write over it with --force")  # fmt: skip
    return True


def _make_directory(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made: {error.strerror}") from error
    if not os.access(out, os.W_OK):
        raise ConfigError(f"--out {out} cannot be written to; look at its permissions")
    if shutil.disk_usage(out).free < 64 << 20:
        raise VimeError(f"{out}: less than 64 MiB free on this file system")


def _write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    _write_text(
        path,
        "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records),
    )


def _write_text(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _pairs(options: Sequence[str]) -> dict[str, Any]:
    """KEY=JSON options; a value that is not JSON is text."""
    result: dict[str, Any] = {}
    for option in options:
        key, sign, value = option.partition("=")
        if not sign or not key:
            raise ConfigError(f"{option!r} is not of the form KEY=VALUE")
        try:
            result[key] = json.loads(value)
        except json.JSONDecodeError:
            result[key] = value
    return result


def _report(arguments: argparse.Namespace, result: Mapping[str, Any], lines: Sequence[str]) -> None:
    print(json.dumps(result, indent=1, default=str) if arguments.json else "\n".join(lines))
