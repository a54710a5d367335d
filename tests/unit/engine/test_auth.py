"""The token middleware, on its own: every route, constant answers, proofs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.engine.auth import TokenMiddleware
from vime_hpc.engine.tokens import (
    HELD_ROUTE,
    HOLD_ENV,
    OPEN_HEALTH_ENV,
    PROOF_HEADER,
    TOKEN_FILE_ENV,
    answer_proof,
    generate_token,
    new_token_file,
    read_token,
)
from vime_hpc.errors import ConfigError


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = new_token_file(tmp_path / "token")
    monkeypatch.setenv(TOKEN_FILE_ENV, str(path))
    monkeypatch.delenv(OPEN_HEALTH_ENV, raising=False)
    monkeypatch.delenv(HOLD_ENV, raising=False)
    return path


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hel", "more_body": True})
    await send({"type": "http.response.body", "body": b"lo"})


def ask(
    method: str,
    path: str,
    bearer: str | None,
    nonce: str = "",
    engine: TokenMiddleware | None = None,
) -> tuple[int, bytes, dict[str, str]]:
    headers = [] if bearer is None else [(b"authorization", f"Bearer {bearer}".encode())]
    if nonce:
        headers.append((b"x-vime-nonce", nonce.encode()))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run((engine or TokenMiddleware(_app))(scope, receive, send))
    found = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:]), found


ROUTES = [
    ("GET", "/health"), ("POST", "/v1/completions"), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/collective_rpc"),
    ("POST", "/update_weights"), ("GET", "/metrics"), ("GET", "/docs"), ("OPTIONS", "/pause"), ("GET", "/anything/else"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("bearer", [None, "", "wrong"])
def test_no_route_answers_without_the_token(
    token_file: Path, method: str, path: str, bearer: str | None
) -> None:
    assert ask(method, path, bearer)[0] == 401


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_the_full_token_opens_every_route(token_file: Path, method: str, path: str) -> None:
    assert ask(method, path, read_token(token_file))[:2] == (200, b"hello")


def test_the_generate_token_opens_generation_alone(token_file: Path) -> None:
    capability = generate_token(read_token(token_file))
    opened = {path for method, path in ROUTES if ask(method, path, capability)[0] == 200}
    assert opened == {"/health", "/v1/completions"}


def test_health_is_open_only_behind_the_router(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPEN_HEALTH_ENV, "1")
    assert ask("GET", "/health", None)[0] == 200
    assert ask("POST", "/health", None)[0] == 401
    assert ask("POST", "/v1/completions", None)[0] == 401


def test_a_held_engine_generates_nothing_and_is_not_well_for_the_router_until_it_was_resumed(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPEN_HEALTH_ENV, "1")
    monkeypatch.setenv(HOLD_ENV, "1")
    engine, full = TokenMiddleware(_app), read_token(token_file)
    generate = generate_token(full)

    def statuses() -> list[int]:
        asks = [("/v1/completions", full), ("/v1/completions", generate), ("/health", None)]
        return [
            ask("GET" if bearer is None else "POST", path, bearer, engine=engine)[0]
            for path, bearer in asks
        ]

    assert statuses() == [503, 503, 503]
    assert ask("GET", HELD_ROUTE, generate, engine=engine)[1] == b'{"held": true}'
    assert ask("GET", "/health", full, engine=engine)[0] == 200  # for whoever started it
    assert ask("POST", "/collective_rpc", full, engine=engine)[0] == 200
    assert ask("POST", "/resume", generate, engine=engine)[0] == 401
    assert statuses() == [503, 503, 503]
    assert ask("POST", "/resume", full, engine=engine)[0] == 200
    assert statuses() == [200, 200, 200]
    assert ask("GET", HELD_ROUTE, generate, engine=engine)[1] == b'{"held": false}'


def test_a_resume_that_is_refused_does_not_let_go_of_a_held_engine(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOLD_ENV, "1")

    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    engine, full = TokenMiddleware(refusing), read_token(token_file)
    assert ask("POST", "/resume", full, engine=engine)[0] == 500
    assert ask("GET", HELD_ROUTE, full, engine=engine)[1] == b'{"held": true}'


def test_an_answer_to_a_nonce_is_proved_and_the_proof_covers_nonce_status_and_body(
    token_file: Path,
) -> None:
    token = read_token(token_file)
    _, body, headers = ask("POST", "/v1/completions", token, nonce="n1")
    proof = headers[PROOF_HEADER]
    assert body == b"hello"
    assert proof == answer_proof(token, "n1", 200, b"hello")
    others = [("n2", 200, b"hello"), ("n1", 500, b"hello"), ("n1", 200, b"hellO")]
    assert proof not in [answer_proof(token, *o) for o in others]


def test_a_token_file_that_others_can_read_or_that_is_a_link_is_refused(tmp_path: Path) -> None:
    path = new_token_file(tmp_path / "token")
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_token(path)) == 64
    os.chmod(path, 0o640)
    with pytest.raises(ConfigError, match="mode 0640"):
        read_token(path)
    os.chmod(path, 0o600)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        read_token(tmp_path / "link")
    with pytest.raises(FileExistsError):
        new_token_file(path)
    path.write_text("short")
    with pytest.raises(ConfigError, match="5 characters"):
        read_token(path)
