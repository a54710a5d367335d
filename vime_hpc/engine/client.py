"""Asynchronous clients of one or many engines: token ids in, token ids and logprobs out; and control calls.

Generation may go through vllm-router or be spread here over the engines' own addresses (least requests in flight).
Control calls go to each engine directly: the router would hand them to one engine of its choice.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from vime_hpc.engine.tokens import NONCE_HEADER, PROOF_HEADER, answer_proof, generate_token
from vime_hpc.errors import DeadlineError, EngineError, EngineLostError
from vime_hpc.types import ExpertArray

FAILED = "failed"
LOWEST_LOGPROB = -9999.0  # vLLM's HTTP layer writes this for -inf, which JSON cannot hold
BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
KEEPALIVE_S = 3.0  # below the 5 s after which vLLM closes an idle connection
RETRIED = frozenset({429, 500, 502, 503, 504})
# A prompt no engine can take is sometimes answered with 500 (vllm-router PR 148): trying again cannot help.
REFUSALS = (
    "too long",
    "maximum context length",
    "max_model_len",
    "max_tokens",
    "out of vocabulary",
    "validation",
    "out of range float",
    "not json compliant",
    "longer than",
)


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One response. `finish_reason` is the engine's (stop, length, abort), or "failed" with the reason in `cause`."""

    tokens: list[int]
    logprobs: list[float]
    """Natural logs, rounded to float32, of the temperature-scaled distribution; one per token."""
    finish_reason: str
    routed_experts: ExpertArray | None = None
    """[prompt + tokens - 1, layers * top_k] when the engine records them."""
    num_tries: int = 1
    cause: str = ""

    @property
    def failed(self) -> bool:
        return self.finish_reason == FAILED


class EngineHTTPClient:
    """Bounded, retrying client. Use as an async context manager, within one event loop.

    Args:
        urls: engines, or the router alone.
        token: the run's token; only the capability derived from it is sent.
        model: served model name.
        concurrency: requests in flight at most.
        request_timeout_s: longest one request may take; over it the answer is failed.
        max_tries: tries per request in all, on 5xx and lost connections.
        check_proof: refuse an answer without the engine's proof (needs auth.TokenMiddleware in the engine).
        extra: further fields of every request (stop_token_ids, …).
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        *,
        model: str = "policy",
        concurrency: int = 256,
        request_timeout_s: float = 600.0,
        max_tries: int = 5,
        check_proof: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if not urls:
            raise EngineError("no engine address was given")
        self._token, self._model, self._check_proof = token, model, check_proof
        self._timeout_s, self._max_tries, self._extra = (
            request_timeout_s,
            max_tries,
            dict(extra or {}),
        )
        self._slots = asyncio.Semaphore(concurrency)
        self._load = {url.rstrip("/"): 0 for url in urls}
        self._session: aiohttp.ClientSession | None = None
        self.counts: Counter[str] = Counter()
        """requests, tries, retries_http_NNN, retries_connection, refused, timeouts, bad_logprobs."""

    async def __aenter__(self) -> EngineHTTPClient:
        headers = {"Authorization": f"Bearer {generate_token(self._token)}"}
        # limit=0: our semaphore bounds; trust_env=False: no proxy between nodes of one job.
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def sample(
        self,
        *,
        prompt_tokens: Sequence[int],
        seed: int,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        **more: Any,
    ) -> EngineAnswer:
        """One response to one prompt.

        Returns:
            the answer; failed (with `cause`) when this request cannot be answered, whoever is asked.
        Raises:
            EngineLostError: no engine could be reached within max_tries.
            EngineError: no engine answered within max_tries, the token was refused, or an answer was not an engine's.
        """
        body = {
            "model": self._model, "prompt": [int(t) for t in prompt_tokens], "max_tokens": max_tokens, "seed": seed,
            "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": 0, "return_token_ids": True,
            "skip_special_tokens": False, "n": 1, **self._extra, **more,
        }  # fmt: skip
        async with self._slots:
            self.counts["requests"] += 1
            return await self._ask(body)

    async def _ask(self, body: Mapping[str, Any]) -> EngineAnswer:
        problem = ""
        error_class: type[EngineError] = EngineError
        for attempt in range(1, self._max_tries + 1):
            if attempt > 1:
                await asyncio.sleep(min(BACKOFF_S * 2 ** (attempt - 2), MAX_BACKOFF_S))
            self.counts["tries"] += 1
            url = min(self._load, key=self._load.__getitem__)
            self._load[url] += 1
            try:
                status, text = await self._post(url, body)
            except TimeoutError:
                self.counts["timeouts"] += 1
                return _failed(
                    f"no answer from {url} within rollout.request_timeout_s = {self._timeout_s:.0f} s",
                    attempt,
                )
            except aiohttp.ClientError as error:
                self.counts["retries_connection"] += 1
                problem, error_class = f"{type(error).__name__}: {error}", EngineLostError
                continue
            finally:
                self._load[url] -= 1
            if status == 200:
                return self._parsed(text, body, attempt)
            problem, error_class = f"HTTP {status}: {_message(text)}", EngineError
            if status == 401:
                raise EngineError(
                    f"{url} refused our token; it belongs to another run, or was started with another token file"
                )
            if status not in RETRIED or any(word in problem.lower() for word in REFUSALS):
                self.counts["refused"] += 1
                return _failed(problem, attempt)
            self.counts[f"retries_http_{status}"] += 1
        raise error_class(
            f"no answer after {self._max_tries} tries at {', '.join(self._load)}; the last one: {problem}. "
            f"The engine's log says more"
        )

    async def _post(self, url: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        if self._session is None:
            raise EngineError("the engine client is used outside of its `async with`")
        nonce = secrets.token_hex(16)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, connect=30.0)
        async with self._session.post(
            f"{url}/v1/completions", json=body, headers={NONCE_HEADER: nonce}, timeout=timeout
        ) as answer:
            text = await answer.read()
            if answer.status == 200 and self._check_proof:
                expected = answer_proof(self._token, nonce, 200, text)
                if not secrets.compare_digest(answer.headers.get(PROOF_HEADER, ""), expected):
                    raise EngineError(
                        f"the answer from {url} does not carry an engine's proof: something else answers "
                        f"there, or the router was given a worker that is not ours"
                    )
            return answer.status, text

    def _parsed(self, text: bytes, body: Mapping[str, Any], attempt: int) -> EngineAnswer:
        try:
            choice = json.loads(text)["choices"][0]
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            echoed = choice.get("prompt_token_ids")
        except (ValueError, LookupError, TypeError) as error:
            raise EngineError(
                f"an engine's answer cannot be read ({type(error).__name__}: {error}): {text[:200]!r}"
            ) from error
        if echoed is not None and echoed != body["prompt"]:
            raise EngineError("an engine answered another prompt than the one asked")
        if len(tokens) != len(logprobs):
            raise EngineError(
                f"an engine answered {len(tokens)} tokens and {len(logprobs)} logprobs"
            )
        bad = [
            i
            for i, p in enumerate(logprobs)
            if p is None or not math.isfinite(p) or p <= LOWEST_LOGPROB
        ]
        if bad:
            self.counts["bad_logprobs"] += 1
            return _failed(
                f"logprob of response token {bad[0]} is {logprobs[bad[0]]} ({len(bad)} of {len(logprobs)} are not "
                f"finite): the engine's weights or cache are probably broken",
                attempt,
            )
        experts = _experts(choice.get("routed_experts"))
        rounded = np.asarray(logprobs, dtype=np.float32).tolist()
        return EngineAnswer(
            [int(t) for t in tokens], rounded, str(choice["finish_reason"]), experts, attempt
        )


def _failed(cause: str, attempt: int) -> EngineAnswer:
    return EngineAnswer([], [], FAILED, None, attempt, cause)


def _experts(encoded: str | None) -> ExpertArray | None:
    """base64 of .npy bytes [rows, layers, top_k] → [rows, layers * top_k]."""
    if encoded is None:
        return None
    array = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    flat: ExpertArray = array.reshape(len(array), -1)
    return flat


def _message(text: bytes) -> str:
    try:
        answer = json.loads(text)
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except (ValueError, AttributeError):
        return text[:500].decode(errors="replace")


class EngineControl:
    """Control calls to one engine, with the full token. Each call opens its own connection: there are few."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 300.0, name: str = "") -> None:
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self.name = name or self.url
        self._token = token

    async def pause(self, mode: str = "wait") -> None:
        """wait: finish requests in flight; abort: end them with what they have; keep: freeze them until resume."""
        await self._call("POST", "/pause", params={"mode": mode, "clear_cache": "true"})

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def sleep(self, level: int) -> None:
        """Give the engine's GPU memory back, aborting what is in flight. The KV cache is dropped; the weights go to host
        memory (1) or are dropped, too (2). On a CPU engine nothing happens.
        """
        await self._call("POST", "/sleep", params={"level": str(level), "mode": "abort"})

    async def wake_up(self, part: str) -> None:
        """Take GPU memory again for "weights" or "kv_cache". After level 2 the weights are undefined until they are loaded."""
        await self._call("POST", "/wake_up", params={"tags": part})

    async def is_paused(self) -> bool:
        return bool((await self._call("GET", "/is_paused"))["is_paused"])

    async def reset_prefix_cache(self, *, running: bool = False) -> None:
        """Forget every cached prefix. Raises EngineError when the engine says that it did not."""
        answer = await self._call(
            "POST",
            "/reset_prefix_cache",
            params={"reset_running_requests": "true" if running else "false"},
        )
        # Before 0.27 the route answers without a body; 200 is all it says.
        if answer and answer.get("success") is not True:
            raise EngineError(
                f"{self.name} refused to reset its prefix cache ({answer}): requests still hold blocks, and new "
                f"tokens would be computed from old weights' keys and values"
            )

    async def collective_rpc(
        self, method: str, *args: Any, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Call a method on every worker of the engine; one reply a rank. Raises EngineError on a reply with an error."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        answer = await self._call(
            "POST",
            "/collective_rpc",
            timeout_s=limit + 10,
            body={"method": method, "args": list(args), "timeout": limit + 5},
        )
        replies: list[dict[str, Any]] = answer["results"]
        errors = [
            f"rank {i}: {r['error']}"
            for i, r in enumerate(replies)
            if isinstance(r, dict) and "error" in r
        ]
        if errors:
            raise EngineError(f"{self.name}, {method}: {'; '.join(errors)}")
        return replies

    async def healthy(self, timeout_s: float = 5.0) -> bool:
        try:
            await self._call("GET", "/health", timeout_s=timeout_s)
        except (EngineError, DeadlineError):
            return False
        return True

    async def _call(
        self,
        method: str,
        route: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        limit = self._timeout_s if timeout_s is None else timeout_s
        timeout = aiohttp.ClientTimeout(total=limit)
        nonce = secrets.token_hex(16)
        headers = {"Authorization": f"Bearer {self._token}", NONCE_HEADER: nonce}
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=False) as session,
                session.request(method, self.url + route, params=params, json=body) as answer,
            ):
                text = await answer.read()
                if answer.status != 200:
                    raise EngineError(
                        f"{self.name} answered {method} {route} with HTTP {answer.status}: {_message(text)}"
                    )
                if not secrets.compare_digest(
                    answer.headers.get(PROOF_HEADER, ""),
                    answer_proof(self._token, nonce, 200, text),
                ):
                    raise EngineError(
                        f"{self.name}: the answer to {route} does not carry an engine's proof; something else "
                        f"answers at {self.url}"
                    )
                found: dict[str, Any] = json.loads(text) if text else {}
                return found
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name} did not answer {method} {route} within {limit:.0f} s"
            ) from error
        except aiohttp.ClientError as error:
            raise EngineLostError(
                f"{self.name} cannot be reached for {method} {route}: {type(error).__name__}: {error}"
            ) from error
