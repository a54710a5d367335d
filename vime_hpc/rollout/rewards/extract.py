r"""Finding the answer inside a response.

Rules, the same for every verifier that names one of them:
    text    the whole response, without surrounding white space
    tag     between the last <answer> and </answer>
    boxed   inside the last \boxed{...} or \fbox{...}, braces balanced; an unclosed one is no answer
    line    after the last "Answer:" up to the end of its line, without surrounding $ and a final
    period auto    the first of tag, boxed, line that is there, else text
The whole response is looked at; there is no window that could cut a long answer.
"""

from __future__ import annotations

import re

from vime_hpc.errors import ConfigError

RULES = ("auto", "text", "tag", "boxed", "line")


def extract(text: str, rule: str) -> str | None:
    """The answer by this rule, or None where there is none.

    Raises:
        ConfigError: unknown rule.
    """
    if rule == "text":
        return text.strip()
    if rule == "tag":
        return _tag(text)
    if rule == "boxed":
        return last_boxed(text)
    if rule == "line":
        return _line(text)
    if rule == "auto":
        for found in (_tag(text), last_boxed(text), _line(text)):
            if found is not None:
                return found
        return text.strip()
    raise ConfigError(f'extract = "{rule}" is unknown; there are {", ".join(RULES)}')


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} holds, braces balanced; None if it is never
    closed.
    """
    starts = [m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]
    if not starts:
        return None
    start = starts[-1]
    depth = 1
    place = start
    while place < len(text):
        if text[place] == "\\":
            place += 2  # an escaped brace does not count
            continue
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place].strip()
        place += 1
    return None


def _tag(text: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return found[-1].strip() if found else None


def _line(text: str) -> str | None:
    found = re.findall(r"(?i)answer\s*:\s*([^\n]*)", text)
    if not found:
        return None
    answer: str = found[-1].strip().rstrip(".").strip()
    if len(answer) > 1 and answer[0] == answer[-1] == "$":
        answer = answer.strip("$").strip()
    return answer
