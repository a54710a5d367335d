"""vllm-router in front of several engines, supervised like an engine.

What 0.1.17 does about authentication (measured): it demands nothing of its callers, `--api-key` or not; it hands a caller's
Authorization header on to the engine for /v1/…; with `--api-key` it puts that key on requests of callers that have none,
so it must never get one. Hence: the router holds no secret, engines demand the token whoever forwards, the client sends it
a capability that is good for generation alone, and every answer carries a proof that only an engine of the run can make.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vime_hpc.engine.passthrough import to_argv
from vime_hpc.engine.supervised import SupervisedServer, free_port
from vime_hpc.errors import EngineError

ROUTER_MODULE = "vllm_router.launch_router"
DEFAULTS: Mapping[str, Any] = {
    "policy": "round_robin",  # deterministic; cache_aware sends a whole prompt group to one engine
    "retry-max-retries": 2,  # the client retries too, and counts
    "worker-startup-check-interval": 1, "worker-startup-timeout-secs": 60, "health-check-interval-secs": 2,
    "max-concurrent-requests": 65536, "queue-size": 65536, "log-level": "warning",
}  # fmt: skip


class RouterServer(SupervisedServer):
    """Start with `start()`, then `wait_ready()`.

    Args:
        worker_urls: the engines, which must answer already (a dead one blocks the start).
        router: the [router] table.
        host: address to bind to. token_file: only its safety is checked; the router never sees the token.
        log_path: where its output goes. request_timeout_s: longest a request may take.
    """

    def __init__(
        self,
        worker_urls: Sequence[str],
        *,
        router: Mapping[str, Any],
        host: str,
        token_file: Path,
        log_path: Path,
        request_timeout_s: float,
    ) -> None:
        self._workers, self._router = list(worker_urls), dict(router)
        self._request_timeout_s = request_timeout_s
        super().__init__(
            name="router",
            module=ROUTER_MODULE,
            host=host,
            log_path=log_path,
            token_file=token_file,
            health_route="/readiness",
        )

    def argv(self, port: int) -> list[str]:
        """vllm-router's command line."""
        given = {k.replace("_", "-"): v for k, v in self._router.items()}
        return [
            "--host", self.host, "--port", str(port), "--worker-urls", *self._workers,
            "--prometheus-host", self.host, "--prometheus-port", str(free_port(self.host)), "--disable-circuit-breaker",
            "--request-timeout-secs", str(int(self._request_timeout_s) + 1), *to_argv({**DEFAULTS, **given}),
        ]  # fmt: skip

    def environment(self, private_dir: Path) -> dict[str, str]:
        del private_dir
        return {}

    def answers(self, timeout_s: float = 2.0) -> bool:
        """True when the router has a healthy engine."""
        try:
            return self._ask("GET", self._health_route, timeout_s)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def workers(self) -> list[str]:
        """The engines the router knows. One that is not ours means that somebody else added it (it asks for no token)."""
        urls: list[str] = json.loads(self._ask("GET", "/list_workers", 5.0)[1])["urls"]
        if foreign := sorted(set(urls) - set(self._workers)):
            raise EngineError(
                f"the router at {self.url} was given workers that are not ours: {', '.join(foreign)}"
            )
        return urls

    async def add_worker(self, url: str, timeout_s: float = 30.0) -> None:
        """Put an engine into rotation; it must answer already. Raises EngineError when the router refuses."""
        await asyncio.to_thread(self._change, "add_worker", url, timeout_s)
        if url not in self._workers:
            self._workers.append(url)

    async def remove_worker(self, url: str, timeout_s: float = 30.0) -> None:
        """Take an engine out of rotation."""
        await asyncio.to_thread(self._change, "remove_worker", url, timeout_s)

    def _change(self, what: str, url: str, timeout_s: float) -> None:
        status, text = self._ask("POST", f"/{what}?url={quote(url, safe='')}", timeout_s)
        if status != 200:
            raise EngineError(
                f"the router answered {what} {url} with HTTP {status}: {text[:300].decode(errors='replace')}"
            )

    def _ask(self, method: str, route: str, timeout_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, route)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()
