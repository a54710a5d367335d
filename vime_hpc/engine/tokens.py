"""The run's secret, and what is derived from it: a capability to generate, and proofs that an answer is an engine's own."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from vime_hpc.errors import ConfigError

TOKEN_FILE_ENV = "VIME_TOKEN_FILE"
OPEN_HEALTH_ENV = "VIME_OPEN_HEALTH"
HOLD_ENV = "VIME_HOLD"
HELD_ROUTE = "/vime/held"
NONCE_HEADER = "x-vime-nonce"
PROOF_HEADER = "x-vime-proof"
TOKEN_BYTES = 32


def new_token_file(path: Path) -> Path:
    """Write a new 256-bit token, readable by us alone. Raises FileExistsError when there is one."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as f:
        f.write(secrets.token_hex(TOKEN_BYTES))
    return path


def read_token(path: Path) -> str:
    """The token. Raises ConfigError when the file is not ours, is readable by others, or holds no token."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd) as f:
        status = os.fstat(f.fileno())
        token = f.read().strip()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{path}: the token file must belong to this user with mode 0600, found uid {status.st_uid} mode "
            f"{stat.S_IMODE(status.st_mode):04o}; remove it, a new one is made: rm {path}"
        )
    if len(token) < 2 * TOKEN_BYTES:
        raise ConfigError(
            f"{path}: holds {len(token)} characters, expected {2 * TOKEN_BYTES}; remove it: rm {path}"
        )
    return token


def generate_token(token: str) -> str:
    """A capability derived from the token that engines accept for generation alone. This is what the router sees."""
    return hmac.new(token.encode(), b"vime generate", hashlib.sha256).hexdigest()


def answer_proof(token: str, nonce: str, status: int, body: bytes) -> str:
    """Binds an answer to the request's nonce and to the token: nobody between engine and client can have made it."""
    h = hmac.new(token.encode(), f"{nonce}|{status}|".encode(), hashlib.sha256)
    h.update(body)
    return h.hexdigest()
