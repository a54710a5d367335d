"""ASGI middleware of every engine: a token on every route (vLLM's --api-key leaves /pause, /collective_rpc … open).

The full token opens everything; the derived generate token opens generation only. Answers to requests that carry a
nonce are proved with the full token, so that the router in between, which demands no token itself, need not be trusted.
Only exception: GET /health without a token, when the engine stands behind vllm-router (whose probe cannot carry one).

An engine that was started again holds the weights of its model directory, which no version stands for. It is started
held: until the first POST /resume, which ends an update, it generates nothing and tells the router that it is not well.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from vime_hpc.engine.tokens import (
    HELD_ROUTE,
    HOLD_ENV,
    NONCE_HEADER,
    OPEN_HEALTH_ENV,
    PROOF_HEADER,
    TOKEN_FILE_ENV,
    answer_proof,
    generate_token,
    read_token,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATE_ROUTES = frozenset({
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/health"),
    ("GET", "/version"), ("GET", HELD_ROUTE),
})  # fmt: skip


class TokenMiddleware:
    """Given to vLLM by --middleware. Reads the token file named in the environment, once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._token = read_token(Path(os.environ[TOKEN_FILE_ENV]))
        self._full = _hashed(self._token)
        self._generate = _hashed(generate_token(self._token))
        self._open_health = os.environ.get(OPEN_HEALTH_ENV) == "1"
        self._held = os.environ.get(HOLD_ENV) == "1"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and self._allowed(scope):
            nonce = _header(scope, NONCE_HEADER)
            await self._serve(
                scope, receive, _Prover(send, self._token, nonce).send if nonce else send
            )
        elif scope["type"] == "http":
            await _answer(
                send, 401, {"error": "this engine belongs to a vime_hpc run and demands its token"}
            )
        else:  # websocket: nothing of ours uses one
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = (scope["method"], scope["path"])
        if route == ("GET", HELD_ROUTE):
            await _answer(send, 200, {"held": self._held})
        elif self._held and _is_withheld(scope):
            await _answer(
                send, 503, {"error": "this engine was started again and has no weights yet"}
            )
        elif self._held and route == ("POST", "/resume"):
            await self._app(scope, receive, self._releasing(send))
        else:
            await self._app(scope, receive, send)

    def _releasing(self, send: Send) -> Send:
        """`send` that lets go of a held engine with an answer of 200."""

        async def release(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._held = False
            await send(message)

        return release

    def _allowed(self, scope: Scope) -> bool:
        route = (scope["method"], scope["path"])
        given = _hashed(_header(scope, "authorization").removeprefix("Bearer "))
        full = hmac.compare_digest(given, self._full)
        generate = hmac.compare_digest(given, self._generate)
        if self._open_health and route == ("GET", "/health"):
            return True
        return full or (generate and route in GENERATE_ROUTES)


class _Prover:
    """Holds an answer back until it is whole, then sends it with its proof in a header."""

    def __init__(self, send: Send, token: str, nonce: str) -> None:
        self._send, self._token, self._nonce = send, token, nonce
        self._start: Message = {}
        self._body: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._body.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = b"".join(self._body)
                proof = answer_proof(self._token, self._nonce, self._start["status"], body)
                headers = [*self._start.get("headers", []), (PROOF_HEADER.encode(), proof.encode())]
                await self._send({**self._start, "headers": headers})
                await self._send({"type": "http.response.body", "body": body})
        else:
            await self._send(message)


def _header(scope: Scope, name: str) -> str:
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == wanted), "")


def _hashed(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _is_withheld(scope: Scope) -> bool:
    """Generation, and the router's probe, which carries no token."""
    return scope["path"].startswith("/v1/") or not _header(scope, "authorization")


async def _answer(send: Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
