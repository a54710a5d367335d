"""The engine host: keeps one vLLM server alive beside it, says where it is, and starts it again when it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import time

from vime_hpc.cluster.devices import own_gpus, visible_gpus
from vime_hpc.cluster.rank import HOST_RESTARTS, Role
from vime_hpc.cluster.rendezvous import Rendezvous, host_address
from vime_hpc.config.plugin import refuse_foreign_module
from vime_hpc.config.tree import RunConfig
from vime_hpc.engine.client import EngineControl
from vime_hpc.engine.server import VLLM_SERVER, EngineServer, resolve_device
from vime_hpc.engine.tokens import read_token
from vime_hpc.errors import DeadlineError, EngineError
from vime_hpc.roles.context import RoleContext
from vime_hpc.roles.lives import EngineLife
from vime_hpc.roles.meeting import meeting

log = logging.getLogger(__name__)
WATCH_S = 0.2
OWN_END_S = 4.0
"""Whoever cannot reach an engine may know before its keeper has cleaned up behind it."""


def run_engine_host(context: RoleContext) -> None:
    """Serve until the rollout workers are done or somebody failed; the server ends with us, whatever ends us."""
    server = _server(context)
    restarted = os.environ.get(HOST_RESTARTS, "0") != "0"
    try:
        if not restarted:
            server.start()  # before the meeting: its imports take longest of all
        with meeting(context) as rendezvous:
            life = EngineLife(rendezvous, server.index, context.config.engine.max_restarts)
            serve_lives(server, life, rendezvous, context.config, restarted=restarted)
    finally:
        server.stop()


def serve_lives(
    server: EngineServer,
    life: EngineLife,
    rendezvous: Rendezvous,
    config: RunConfig,
    *,
    restarted: bool = False,
) -> None:
    """Begin one life of the engine after the other until the rollout workers are done or somebody failed.

    Args:
        server: started already, unless this host was `restarted`.
    Raises:
        EngineError: the engine ended, and may or can not be started again; says why it ended.
    """
    port = life.last_port()
    life.begin("its host was killed" if life.number else "")
    if restarted:
        log.warning("engine %d begins life %d: its host was killed", server.index, life.number)
        _start_again(server, config, port)
    while True:
        cause = _live(server, life, rendezvous, config)
        if not cause:
            return
        life.begin(cause)
        log.warning("engine %d begins life %d: %s", server.index, life.number, cause)
        port = server.port
        server.stop()
        _start_again(server, config, port)


def _start_again(server: EngineServer, config: RunConfig, port: int | None) -> None:
    """At the same address, and held until its first update where a trainer sends one."""
    server.held = config.run.mode != "rollout_only"
    server.start(port)


def _live(server: EngineServer, life: EngineLife, rendezvous: Rendezvous, config: RunConfig) -> str:
    """One life of the server; returns why it ended, or nothing when the job did."""
    try:
        server.wait_ready(config.run.startup_timeout_s)
        if life.number > 1:
            control = EngineControl(server.url, read_token(server.token_file), name=server.name)
            asyncio.run(control.collective_rpc("vime_guard"))
    except (EngineError, DeadlineError) as error:
        if life.number == 1:
            raise
        return str(error)
    log.info("engine answers at %s", server.url)
    life.up(server.url, server.pid)
    return _watch(server, life, rendezvous, config.rollout.num_workers)


def _server(context: RoleContext) -> EngineServer:
    config, index = context.config, context.rank.role_rank
    module = config.engine.server
    if module != VLLM_SERVER:  # looking for a module imports its packages, and vLLM's take 11 s
        refuse_foreign_module(module, option="engine.server", path=module)
    return EngineServer(
        config.engine,
        config.model,
        vllm=config.vllm,
        max_model_len=max_model_len(config),
        seed=config.run.seed,
        index=index,
        host=host_address(config.cluster.socket_ifname),
        token_file=context.paths.token,
        log_path=context.attempt_directory / "logs" / f"engine-{index}.vllm.log",
        behind_router=needs_router(config),
        gpus=_gpus(context),
        module=module,
    )


def _gpus(context: RoleContext) -> list[str] | None:
    """The GPUs of this node this engine may see, by their names here; None where it computes on the CPU."""
    visible = visible_gpus()
    if resolve_device(context.config.engine.device) == "cpu" or not visible:
        return None
    return [visible[i] for i in own_gpus(context.config, context.rank, len(visible))]


def _watch(server: EngineServer, life: EngineLife, rendezvous: Rendezvous, num_workers: int) -> str:
    while not all(rendezvous.has(f"left/{Role.ROLLOUT}-{n}") for n in range(num_workers)):
        if cause := _own_end(server):
            return cause
        if wanted := life.end_wanted():
            return _own_end(server, OWN_END_S) or f"{server.name} is ended because {wanted}"
        if rendezvous.has("failed"):
            return ""
        time.sleep(WATCH_S)
    return ""


def _own_end(server: EngineServer, wait_s: float = 0.0) -> str:
    """How the server ended by itself; empty when it did not within so long."""
    end = time.monotonic() + wait_s
    while (code := server.poll()) is None:
        if time.monotonic() >= end:
            return ""
        time.sleep(WATCH_S)
    return (
        f"{server.name} ended with code {code} while serving; the end of {server.log_path}:\n"
        f"{server.log_tail()}"
    )


def max_model_len(config: RunConfig) -> int:
    """Tokens of prompt and response an engine must hold for one request."""
    response = max(config.rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    return config.engine.max_model_len or config.data.max_prompt_tokens + response


def needs_router(config: RunConfig) -> bool:
    """From two engines on requests go through vllm-router."""
    return config.engine.num_engines > 1 or config.engine.always_router
