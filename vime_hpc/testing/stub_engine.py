"""A server with vLLM's routes and no model: for tests of the loops, and to inject faults that vLLM does not have.

Tokens are a function of (weights, prompt, seed), so a wrong or stale weight version is seen in the tokens. It joins the
bridge with the real receiver code (gloo) and demands the real token. Two ways to run it: `StubEngine` in a thread of the
test, or as the module of an `EngineServer` (`module="vime_hpc.testing.stub_engine"`), knobs from VIME_STUB_KNOBS (JSON).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import torch
import uvicorn
import xxhash

from vime_hpc.engine.auth import Message, Receive, Scope, Send, TokenMiddleware
from vime_hpc.engine.supervised import free_port
from vime_hpc.engine.tokens import TOKEN_FILE_ENV
from vime_hpc.engine.worker import WeightReceiver

KNOBS_ENV = "VIME_STUB_KNOBS"
Reply = tuple[int, dict[str, Any]]
Handler = Callable[[dict[str, Any]], Awaitable[Reply]]


@dataclass
class StubKnobs:
    """What goes wrong, and how long things take. Routes are written as in the URL: "/v1/completions"."""

    vocab_size: int = 512
    latency_s: float = 0.0
    """Seconds per generated token."""
    too_long_above: int = 10**9
    """Prompts longer than this get HTTP 500 "prompt too long"."""
    fail_503: int = 0
    """The first so many requests to generate get HTTP 503."""
    nan_above_seed: int = 2**63
    """Requests with a larger seed get a NaN logprob (as the text NaN)."""
    die_on: str = ""
    """Route, or method of /collective_rpc, at which the process ends (os._exit; only as a process of its own)."""
    hang_on: str = ""
    """Route or method at which it never answers."""
    refuse_reset: bool = False
    """Answer {"success": false} to /reset_prefix_cache."""
    loader_fails: bool = False
    """Raise in the model's loader after the first tensor, as a shape error in vLLM would."""
    alter_tensor: str = ""
    """Name of a tensor of which one byte arrives changed."""
    damaged: str = ""
    """Name of a tensor that a readback finds different."""
    routed_experts: tuple[int, int, int] | None = None
    """(layers, experts, top_k): answer routed experts of this shape."""


class StubWorker(WeightReceiver):
    """The real receiver with no model behind it."""

    def __init__(self, knobs: StubKnobs) -> None:
        self.rank = 0
        self.device = torch.device("cpu")
        self.root = "initial"
        self._knobs = knobs

    def _vime_model_dir(self) -> Path | None:
        return None

    def _vime_reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, _ in tensors:
            if self._knobs.loader_fails:
                raise ValueError(f"the loader does not like {name}")

    def vime_receive(self, plan_json: str, version: int) -> dict[str, Any]:
        reply = super().vime_receive(plan_json, version)
        if self._knobs.alter_tensor in self._digests():
            self._digests()[self._knobs.alter_tensor] = "0" * 32
            reply["root"] = "0" * 32
        self.root = str(reply.get("root", "mixed"))
        return reply

    def vime_compare(self) -> dict[str, Any]:
        """As on a GPU, of an engine that keeps plain tensors."""
        names = sorted(self._digests())
        return {"compared": len(names), "different": [n for n in names if n == self._knobs.damaged]}

    def vime_guard(self) -> dict[str, Any]:
        return {}  # it lives in the test's own process

    def _digests(self) -> dict[str, str]:
        state = getattr(self, "_vime", None)
        return {} if state is None else state.digests


class StubApp:
    """The ASGI application: state of one stub engine, and its routes."""

    def __init__(self, knobs: StubKnobs) -> None:
        self.knobs, self.worker = knobs, StubWorker(knobs)
        self.calls: list[str] = []
        """Every control call in order ("pause?mode=wait", "collective_rpc:vime_receive", …)."""
        self.generated = 0
        self._running = asyncio.Event()
        self._running.set()
        self._in_flight = 0
        self._aborting = False
        self._asleep: set[str] = set()
        self._failures_left = knobs.fail_503
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/calls"): self._list_calls,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._wake_up,
            ("POST", "/reset_prefix_cache"): self._reset,
            ("POST", "/collective_rpc"): self._rpc,
            ("POST", "/v1/completions"): self._completions,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        body = await _read(receive)
        query = {k: v[0] for k, v in parse_qs(scope["query_string"].decode()).items()}
        handler = self._routes.get((scope["method"], scope["path"]))
        if handler is None:
            status, answer = 404, {"error": f"no route {scope['method']} {scope['path']}"}
        else:
            await self._fault(scope["path"])
            status, answer = await handler({**(json.loads(body) if body else {}), **query})
        await _answer(send, status, answer)

    async def _fault(self, what: str) -> None:
        if what == self.knobs.die_on:
            os._exit(9)
        if what == self.knobs.hang_on:
            await asyncio.Event().wait()

    async def _health(self, _: dict[str, Any]) -> Reply:
        return 200, {}

    async def _list_calls(self, _: dict[str, Any]) -> Reply:
        return 200, {"calls": self.calls}

    async def _is_paused(self, _: dict[str, Any]) -> Reply:
        return 200, {"is_paused": not self._running.is_set()}

    async def _pause(self, request: dict[str, Any]) -> Reply:
        mode = request.get("mode", "abort")
        self.calls.append(f"pause?mode={mode}")
        self._running.clear()
        self._aborting = mode == "abort"
        while mode in ("wait", "abort") and self._in_flight:
            await asyncio.sleep(0.005)
        return 200, {"status": "paused"}

    async def _sleep(self, request: dict[str, Any]) -> Reply:
        await self._pause({"mode": request["mode"]})
        self.calls[-1] = f"sleep?level={request['level']}"
        self._asleep = {"weights", "kv_cache"}
        return 200, {}

    async def _wake_up(self, request: dict[str, Any]) -> Reply:
        self.calls.append(f"wake_up?tags={request['tags']}")
        self._asleep.discard(request["tags"])
        return 200, {}

    async def _resume(self, _: dict[str, Any]) -> Reply:
        if self._asleep:
            return 500, {"error": f"resumed without memory for {sorted(self._asleep)}"}
        self.calls.append("resume")
        self._aborting = False
        self._running.set()
        return 200, {"status": "resumed"}

    async def _reset(self, _: dict[str, Any]) -> Reply:
        self.calls.append("reset_prefix_cache")
        return 200, {"success": not self.knobs.refuse_reset}

    async def _rpc(self, request: dict[str, Any]) -> Reply:
        method = request["method"]
        if method == "vime_receive" and "weights" in self._asleep:
            return 500, {"error": "weights were sent to an engine that has no memory for them"}
        self.calls.append(f"collective_rpc:{method}")
        await self._fault(method)
        call = getattr(self.worker, method, None)
        if call is None or not method.startswith("vime_"):
            return 400, {"error": f"no method {method}"}
        return 200, {"results": [await asyncio.to_thread(call, *request.get("args", []))]}

    async def _completions(self, request: dict[str, Any]) -> Reply:
        prompt = request["prompt"]
        if self._failures_left > 0:
            self._failures_left -= 1
            return 503, {"error": "No available workers"}
        if len(prompt) > self.knobs.too_long_above:
            return 500, {"error": {"message": f"prompt too long: {len(prompt)} tokens"}}
        await self._running.wait()
        self._in_flight += 1
        try:
            tokens, reason = await self._tokens(request)
        finally:
            self._in_flight -= 1
        self.generated += 1
        logprobs: list[float] = [-math.log(self.knobs.vocab_size)] * len(tokens)
        if request.get("seed", 0) > self.knobs.nan_above_seed:
            logprobs[-1] = math.nan
        choice = {
            "index": 0, "text": "", "finish_reason": reason, "token_ids": tokens, "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": logprobs},
        }  # fmt: skip
        if self.knobs.routed_experts is not None:
            choice["routed_experts"] = _encoded_experts(
                self.knobs.routed_experts, [*prompt, *tokens]
            )
        return 200, {"choices": [choice]}

    async def _tokens(self, request: dict[str, Any]) -> tuple[list[int], str]:
        key = f"{self.worker.root}|{request['prompt']}|{request.get('seed', 0)}"
        rng = np.random.default_rng(xxhash.xxh3_64_intdigest(key.encode()))
        limit = int(request["max_tokens"])
        count = int(rng.integers(1, limit + 1))
        tokens = [int(t) for t in rng.integers(0, self.knobs.vocab_size, count)]
        end = time.monotonic() + self.knobs.latency_s * count
        while (left := end - time.monotonic()) > 0:
            if self._aborting:
                done = count - math.ceil(left / self.knobs.latency_s)
                return tokens[: max(done, 1)], "abort"
            await asyncio.sleep(min(left, 0.005))
        return tokens, "length" if count == limit else "stop"


def _encoded_experts(shape: tuple[int, int, int], tokens: list[int]) -> str:
    """A function of each token alone: row t, layer l holds top_k distinct experts."""
    layers, experts, top_k = shape
    rows = np.asarray(tokens[:-1])[:, None, None] + np.arange(layers)[:, None] + np.arange(top_k)
    out = io.BytesIO()
    np.save(out, (rows % experts).astype(np.uint8 if experts <= 256 else np.uint16))
    return base64.b64encode(out.getvalue()).decode()


async def _read(receive: Receive) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


async def _answer(send: Send, status: int, answer: dict[str, Any]) -> None:
    text = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": text})


class StubEngine:
    """A stub engine in a thread of this process: `with StubEngine(token_file) as engine: engine.url, engine.app.calls`."""

    def __init__(
        self,
        token_file: Path,
        knobs: StubKnobs | None = None,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        os.environ[TOKEN_FILE_ENV] = str(token_file)
        self.app = StubApp(knobs or StubKnobs())
        self.port = free_port(host) if port is None else port
        self.url = f"http://{host}:{self.port}"
        self._server = uvicorn.Server(_uvicorn_config(self.app, host, self.port))
        self._thread = threading.Thread(target=self._server.run, name="stub-engine", daemon=True)

    def __enter__(self) -> StubEngine:
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise TimeoutError(f"the stub engine did not start at {self.url}")
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.force_exit = True
        self._server.should_exit = True
        self._thread.join(10)


def _uvicorn_config(app: StubApp, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        TokenMiddleware(app), host=host, port=port, log_level="warning", access_log=False
    )


def main(argv: list[str]) -> None:
    """As a process: takes vLLM's --host and --port, and lets its other arguments pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    args, _ = parser.parse_known_args(argv)
    raw = json.loads(os.environ.get(KNOBS_ENV, "{}"))
    if raw.get("routed_experts"):
        raw["routed_experts"] = tuple(raw["routed_experts"])
    uvicorn.Server(_uvicorn_config(StubApp(StubKnobs(**raw)), args.host, args.port)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
