"""The built-in verifiers. Plain functions: they may block, and run in a thread or a process of the
RewardRunner.
"""

from __future__ import annotations

import json
import logging
import random as random_module
import re
import string
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from vime_hpc.errors import ConfigError, PromptDataError
from vime_hpc.rollout.rewards.extract import extract
from vime_hpc.types import Prompt, Sample

Verifier = Callable[[Sample, Prompt, Mapping[str, Any]], Mapping[str, Any]]


def exact(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> dict[str, Any]:
    """1 where the answer equals the label, else 0. table: extract (default text), ignore_case
    (default false).
    """
    pred = extract(sample.response_text, str(table.get("extract", "text")))
    label = str(_label(prompt)).strip()
    same = pred == label
    if table.get("ignore_case") and pred is not None:
        same = pred.lower() == label.lower()
    return {"score": float(same), "pred": pred}


def reasoning_gym(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> dict[str, Any]:
    """The score reasoning-gym itself gives, from the entry stored with the prompt.

    The record's metadata holds {"task": name of the data set, "entry": {"answer": ..., "metadata":
    ...}}. table: extract (default auto); exact (default false): only a full score counts, since
        some tasks give part marks, chain_sum for
    instance 1/3 to "137" where 3 is right.
    """
    # seconds of import: only in the process that grades
    from reasoning_gym import get_score_answer_fn

    metadata = prompt.metadata
    if "task" not in metadata or "entry" not in metadata:
        raise PromptDataError(
            f"prompt {prompt.prompt_id} has no metadata.task and metadata.entry, which the reasoning_gym "
            f"verifier needs; vime-hpc data make writes them"
        )
    pred = extract(sample.response_text, str(table.get("extract", "auto")))
    score = float(get_score_answer_fn(metadata["task"])(pred, metadata["entry"]))
    if table.get("exact"):
        score = float(score >= 1.0)
    return {"score": score, "pred": pred}


def math(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> dict[str, Any]:
    r"""1 where the boxed answer equals the label as a mathematical expression, else 0.

    table: extract (default boxed). No answer scores 0; an error of the verifier raises.
    """
    pred = extract(sample.response_text, str(table.get("extract", "boxed")))
    if pred is None or not pred:
        return {"score": 0.0, "pred": pred}
    return {"score": float(same_expression(str(_label(prompt)), pred)), "pred": pred}


def dapo(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> dict[str, Any]:
    r"""DAPO's form: score 1 or -1, acc 1 or 0, pred. Source: arXiv:2503.14476.

    The answer is what follows the last "Answer:" ("Answer: $13$" and "Answer: 13" are the same), or
    else the last \boxed{...}, here compared as an expression.
    """
    text = sample.response_text
    pred = extract(text, "line")
    if pred is None:
        pred = extract(text, "boxed")
    boxed = extract(pred, "boxed") if pred else None
    pred = boxed if boxed is not None else pred
    right = bool(pred) and same_expression(str(_label(prompt)), str(pred))
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}


def f1(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> dict[str, Any]:
    """Harmonic mean of word precision and recall against the label, words as in SQuAD. table:
    extract (default auto).
    """
    pred = extract(sample.response_text, str(table.get("extract", "auto")))
    found, wanted = _words(pred or ""), _words(str(_label(prompt)))
    common = sum((Counter(found) & Counter(wanted)).values())
    if not common:
        return {"score": float(not found and not wanted), "pred": pred}
    precision, recall = common / len(found), common / len(wanted)
    return {"score": 2 * precision * recall / (precision + recall), "pred": pred}


def random(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> dict[str, Any]:
    """0 or 1 by the sample's own seed: to run the machinery without a task."""
    return {"score": float(random_module.Random(sample.seed).random() < 0.5), "pred": None}


def remote(sample: Sample, prompt: Prompt, table: Mapping[str, Any]) -> dict[str, Any]:
    """POST {prompt, response, label, metadata} as JSON to table.url; the answer is a number or an
    object.

    table: url; tries (default 3); timeout_s of one try (default 10). Proxies are not used.
    """
    if "url" not in table:
        raise ConfigError('rollout.reward = "remote" needs rollout.reward_table.url')
    body = {
        "prompt": prompt.text,
        "response": sample.response_text,
        "label": prompt.label,
        "metadata": prompt.metadata,
    }
    data = json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    tries = int(table.get("tries", 3))
    for number in range(tries):
        request = urllib.request.Request(
            str(table["url"]), data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with opener.open(request, timeout=float(table.get("timeout_s", 10))) as answer:
                value = json.loads(answer.read())
            return dict(value) if isinstance(value, dict) else {"score": float(value)}
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            if number + 1 == tries:
                raise
            time.sleep(min(0.5 * 2**number, 5.0))
    raise ConfigError(f"rollout.reward_table.tries = {tries} leaves no try")


BUILT_IN: Mapping[str, Verifier] = {
    "exact": exact,
    "reasoning_gym": reasoning_gym,
    "math": math,
    "dapo": dapo,
    "f1": f1,
    "random": random,
    "remote": remote,
}


LIBRARIES: Mapping[str, str] = {
    "reasoning_gym": "reasoning_gym",
    "math": "math_verify",
    "dapo": "math_verify",
}
"""What a verifier imports when it is first called."""


def same_expression(label: str, pred: str) -> bool:
    """Whether two answers are the same mathematical expression (math-verify).

    math-verify's own time limits use SIGALRM, which only works in a main thread (elsewhere every
    call fails); they are off here, and the RewardRunner's limit holds.

    Raises:
        PromptDataError: the label itself is no expression.
    """
    if _plain(label) == _plain(pred):
        return True
    from math_verify import parse, verify  # imports sympy

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # one warning per call about the limits being off
    gold = parse(_in_box(label), parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise PromptDataError(f"the label {label!r} is not an expression math-verify can read")
    target = parse(_in_box(pred), parsing_timeout=None, raise_on_error=True)
    return bool(verify(gold, target, timeout_seconds=None, raise_on_error=True))


def _in_box(text: str) -> str:
    return text if "\\boxed" in text else f"\\boxed{{{text}}}"


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text.strip().strip("$"))


def _label(prompt: Prompt) -> Any:
    if prompt.label is None:
        raise PromptDataError(
            f"prompt {prompt.prompt_id} has no label (data.label_key) to compare with"
        )
    return prompt.label


def _words(text: str) -> list[str]:
    lowered = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", lowered).split()
