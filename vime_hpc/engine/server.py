"""One vLLM engine: vLLM's own API server in a session of its own, with a keeper that never lets it outlive us."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import EngineConfig
from vime_hpc.engine.passthrough import to_argv
from vime_hpc.engine.supervised import SupervisedServer
from vime_hpc.engine.tokens import HOLD_ENV, OPEN_HEALTH_ENV, TOKEN_FILE_ENV

SERVED_NAME = "policy"
CPU_BATCHED_TOKENS = 4096
VLLM_SERVER = "vllm.entrypoints.openai.api_server"


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """auto: cuda where the NVIDIA driver is. Looks at a device file, so that no CUDA context is made in this process."""
    if device != "auto":
        return device
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


class EngineServer(SupervisedServer):
    """Start with `start()`, then `wait_ready()`; `stop()` or the end of this process ends everything of it.

    Args:
        engine, model: their configuration sections.
        vllm: the [vllm] table.
        max_model_len: tokens of prompt and response together.
        seed: vLLM's own seed (requests carry theirs).
        index: number of the engine in the run.
        host: address to bind to, never 0.0.0.0.
        token_file: file of the run's token (mode 0600).
        log_path: where the server's output goes (appended).
        behind_router: let GET /health through without a token, for the router's probe.
        gpus: devices this engine may see, as CUDA_VISIBLE_DEVICES names them; none = all.
        routed_experts: record which experts every token took.
        module: the server to run; the stub engine takes the same arguments.
    """

    def __init__(
        self,
        engine: EngineConfig,
        model: ModelConfig,
        *,
        vllm: Mapping[str, Any],
        max_model_len: int,
        seed: int,
        index: int,
        host: str,
        token_file: Path,
        log_path: Path,
        behind_router: bool = False,
        gpus: Sequence[int | str] | None = None,
        routed_experts: bool = False,
        module: str = VLLM_SERVER,
    ) -> None:
        self.index = index
        self.held = False
        """Whether the next start generates nothing before its first update (auth.py)."""
        self._engine, self._model = engine, model
        self._vllm = {k.replace("_", "-"): v for k, v in vllm.items()}
        self._max_model_len, self._seed, self._routed_experts = max_model_len, seed, routed_experts
        self._behind_router, self._gpus = behind_router, gpus
        self.device = resolve_device(engine.device)
        super().__init__(
            name=f"engine {index}",
            module=module,
            host=host,
            log_path=log_path,
            token_file=token_file,
            health_route="/health",
        )

    def argv(self, port: int) -> list[str]:
        """vLLM's command line."""
        args = [
            "--model", self._model.path, "--served-model-name", SERVED_NAME, "--host", self.host, "--port", str(port),
            "--middleware", "vime_hpc.engine.auth.TokenMiddleware", "--dtype", self._model.dtype, "--seed", str(self._seed),
            "--max-model-len", str(self._max_model_len), "--tensor-parallel-size", str(self._engine.tp),
            "--logprobs-mode", "processed_logprobs", "--worker-extension-cls", "vime_hpc.engine.worker.WeightReceiver",
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if self.device == "cpu" and "enforce-eager" not in self._vllm:
            # Compiling costs 36 s of g++ and gains nothing on small CPU models.
            args.append("--enforce-eager")
        if self.device == "cpu" and "block-size" not in self._vllm:
            # The CPU default of 128 never shares the prefix of a short prompt.
            args.extend(("--block-size", "32"))
        if self.device == "cpu" and not {
            "enable-chunked-prefill",
            "no-enable-chunked-prefill",
        } & set(self._vllm):
            # A prompt that is prefilled in parts kills the engine core when its request has a seed: vLLM 0.30 rewinds the
            # request's generator, and torch's CPU generator has no offset ("CPU Generator does not use offset").
            args.append("--no-enable-chunked-prefill")
            if "max-num-batched-tokens" not in self._vllm:
                args += [
                    "--max-num-batched-tokens",
                    str(max(CPU_BATCHED_TOKENS, self._max_model_len)),
                ]
        if self.device != "cpu" and self._engine.sleep_level:
            args.append("--enable-sleep-mode")
        if self._routed_experts:
            args.append("--enable-return-routed-experts")
        return args + to_argv(self._vllm)

    def environment(self, private_dir: Path) -> dict[str, str]:
        env = {
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, collective_rpc; every route demands the token
            "VLLM_RPC_BASE_PATH": str(private_dir),  # vLLM's own sockets, which carry pickles, where only we can connect
            TOKEN_FILE_ENV: str(self.token_file), OPEN_HEALTH_ENV: "1" if self._behind_router else "0",
            HOLD_ENV: "1" if self.held else "0",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
            "VLLM_HOST_IP": self.host, "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS", ""),
        }  # fmt: skip
        threads = str(self._engine.num_threads)
        if self.device == "cpu":
            env |= {
                "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": str(self._engine.kv_cache_gib),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" fails with two ranks on a machine of one NUMA node
                "TORCHDYNAMO_DISABLE": "1",  # else the sampler's logprobs need g++ at the first request
            }  # fmt: skip
            if self._engine.tp == 1:
                env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # saves a process and 15 s of start
        else:
            env |= {
                "OMP_NUM_THREADS": threads,
                "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
            }
            if self._gpus is not None:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._gpus))
        return env
