"""The engine host: keeps one vLLM server alive beside it, and says where it is."""

from __future__ import annotations

import logging
import time

from vime_hpc.cluster.devices import own_gpus, visible_gpus
from vime_hpc.cluster.rank import Role
from vime_hpc.cluster.rendezvous import Rendezvous, host_address
from vime_hpc.config.plugin import refuse_foreign_module
from vime_hpc.config.tree import RunConfig
from vime_hpc.engine.server import VLLM_SERVER, EngineServer, resolve_device
from vime_hpc.errors import EngineError
from vime_hpc.roles.context import RoleContext
from vime_hpc.roles.meeting import meeting

log = logging.getLogger(__name__)
WATCH_S = 0.2


def run_engine_host(context: RoleContext) -> None:
    """Serve until the rollout workers are done or somebody failed; the server ends with us, whatever ends us."""
    server = _server(context)
    try:
        server.start()  # before the meeting: its imports take longest of all
        with meeting(context) as rendezvous:
            server.wait_ready(context.config.run.startup_timeout_s)
            log.info("engine answers at %s", server.url)
            rendezvous.put(f"engine/{server.index}", {"url": server.url, "pid": server.pid})
            _watch(server, rendezvous, context.config.rollout.num_workers)
    finally:
        server.stop()


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


def _watch(server: EngineServer, rendezvous: Rendezvous, num_workers: int) -> None:
    while not all(rendezvous.has(f"left/{Role.ROLLOUT}-{n}") for n in range(num_workers)):
        code = server.poll()
        if code is not None:
            raise EngineError(
                f"{server.name} ended with code {code} while serving; the end of {server.log_path}:\n"
                f"{server.log_tail()}"
            )
        if rendezvous.has("failed"):
            return
        time.sleep(WATCH_S)


def max_model_len(config: RunConfig) -> int:
    """Tokens of prompt and response an engine must hold for one request."""
    response = max(config.rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    return config.engine.max_model_len or config.data.max_prompt_tokens + response


def needs_router(config: RunConfig) -> bool:
    """From two engines on requests go through vllm-router."""
    return config.engine.num_engines > 1 or config.engine.always_router
