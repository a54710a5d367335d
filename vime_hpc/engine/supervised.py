"""A server process under a keeper (serve.py): start on a free port, wait until it answers, stop without leftovers."""

from __future__ import annotations

import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import vime_hpc
from vime_hpc.cluster.temporary import cache_of_compiled
from vime_hpc.engine.tokens import (
    NONCE_HEADER,
    PROOF_HEADER,
    answer_proof,
    generate_token,
    read_token,
)
from vime_hpc.errors import ConfigError, DeadlineError, EngineError

STOP_S = 5.0  # the keeper's 2 s of grace, and its clean-up
POLL_S = 0.2
PORT_TRIES = 4
LOG_LINES = 15
SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket."""
SOCKET_NAME_BYTES = len("/vime-xxxxxxxx/") + 36
"""What our directory and vLLM's name of a socket, a UUID, add to the temporary directory's path."""
CLASH = "address already in use"


def private_directory() -> Path:
    """A new directory of ours alone, with a path short enough for the Unix sockets in it."""
    base = tempfile.gettempdir()
    too_long = len(os.fsencode(base)) + SOCKET_NAME_BYTES > SOCKET_PATH_BYTES
    return Path(tempfile.mkdtemp(prefix="vime-", dir="/tmp" if too_long else base))


class SupervisedServer:
    """Base of EngineServer and RouterServer. One thread uses it; `poll` may be called from others."""

    def __init__(
        self,
        *,
        name: str,
        module: str,
        host: str,
        log_path: Path,
        token_file: Path,
        health_route: str,
    ) -> None:
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"{name} may not bind to {host or 'every address'!r}: others on the network would reach it; "
                f"give the address of one interface (cluster.socket_ifname)"
            )
        self.name, self.host, self.log_path, self.token_file = name, host, log_path, token_file
        self.port = 0
        self._fixed_port: int | None = None
        self._module, self._health_route = module, health_route
        self._keeper: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._private_dir = Path()
        self._log_start = 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The keeper's pid, which is also the session id of everything it started."""
        return self._keeper.pid if self._keeper else 0

    def argv(self, port: int) -> list[str]:
        raise NotImplementedError

    def environment(self, private_dir: Path) -> dict[str, str]:
        raise NotImplementedError

    def start(self, port: int | None = None) -> None:
        """Start the process; does not wait.

        Args:
            port: where it must listen; none = a free one, and another should that be taken after all.
        Raises:
            ConfigError: a token file that is not safe.
        """
        read_token(self.token_file)
        self._fixed_port = port
        self.port = free_port(self.host) if port is None else port
        self._private_dir = private_directory()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._log_start = os.fstat(log).st_size
        read_end, self._pipe = os.pipe()
        path = os.pathsep.join(
            p
            for p in (str(Path(vime_hpc.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
            if p
        )
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "PYTHONSAFEPATH": "1",  # for what vLLM starts
            # vLLM leaves vllm_dist_* files where temporary files go; there the keeper removes them. What torch compiled is
            # kept for the next start.
            "TORCHINDUCTOR_CACHE_DIR": cache_of_compiled(),
            "TMPDIR": str(self._private_dir),
            **self.environment(self._private_dir),
        }
        command = [
            sys.executable,
            "-P",
            "-m",
            "vime_hpc.engine.serve",
            str(read_end),
            str(self._private_dir),
            self._module,
            *self.argv(self.port),
        ]
        try:
            self._keeper = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(read_end,),
            )
        finally:
            os.close(read_end)
            os.close(log)

    def wait_ready(self, timeout_s: float) -> None:
        """Block until the server answers its health route.

        Raises:
            EngineError: it ended; the message has the last lines of its log.
            DeadlineError: it did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        tries = 1
        while not self.answers():
            if self.poll() is not None:
                if CLASH in self._log_text().lower() and tries < PORT_TRIES:
                    tries += 1
                    self.stop()
                    self.start(self._fixed_port)
                    continue
                code = self.poll()
                self.stop()
                raise EngineError(
                    f"{self.name} ended with code {code} while starting. Last lines of {self.log_path}:\n"
                    f"{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                tail = self.log_tail()
                self.stop()
                raise DeadlineError(
                    f"{self.name} did not answer {self.url}{self._health_route} within {timeout_s:.0f} s. Last "
                    f"lines of {self.log_path}:\n{tail}"
                )
            time.sleep(POLL_S)

    def answers(self, timeout_s: float = 2.0) -> bool:
        """True when our own server answers the health route with 200 right now."""
        token, nonce = read_token(self.token_file), secrets.token_hex(16)
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            headers = {"Authorization": f"Bearer {generate_token(token)}", NONCE_HEADER: nonce}
            connection.request("GET", self._health_route, headers=headers)
            answer = connection.getresponse()
            proof = answer_proof(token, nonce, 200, answer.read())
            # Without its proof it is somebody else's server, on a port that we thought free.
            return answer.status == 200 and secrets.compare_digest(
                answer.getheader(PROOF_HEADER, ""), proof
            )
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def poll(self) -> int | None:
        """None while it runs, else its exit code."""
        return self._keeper.poll() if self._keeper else None

    def stop(self) -> None:
        """End every process of it, within STOP_S; safe to call twice."""
        if self._keeper is None:
            return
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        try:
            self._keeper.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._keeper.pid, signal.SIGKILL)
            self._keeper.wait()
        shutil.rmtree(self._private_dir, ignore_errors=True)

    def log_tail(self) -> str:
        return "\n".join(self._log_text().splitlines()[-LOG_LINES:])

    def _log_text(self) -> str:
        with self.log_path.open("rb") as f:
            f.seek(self._log_start)
            return f.read().decode(errors="replace")

    def __enter__(self) -> SupervisedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_port(host: str) -> int:
    """A port free at this moment; the server that finds it taken after all is started again on another."""
    with socket.socket() as s:
        s.bind((host, 0))
        port: int = s.getsockname()[1]
        return port
