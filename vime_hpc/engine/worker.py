"""vLLM's end of the bridge: methods added to every worker through `--worker-extension-cls` and called by /collective_rpc.

One shape for vLLM 0.24 … 0.33: `worker_extension_cls`, `collective_rpc` and `model_runner.reload_weights(weights_iterator=…)`
did not change over these versions, while the native weight-transfer engine has three. Nothing of vLLM is patched.
An error is returned as {"error": …}, never raised: with tensor parallelism vLLM 0.30 keeps a sibling's error in the
queue and reports it as the answer of the NEXT call.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store, TCPStore

from vime_hpc.cluster.groups import BridgeGroup, bridge_group, device_identity
from vime_hpc.engine.placement import Placement, find_placement
from vime_hpc.engine.process_guard import die_with_parent
from vime_hpc.engine.reads import Recording, model_tensors, parts_of_whole
from vime_hpc.errors import DeadlineError, EngineError, VimeError
from vime_hpc.weights.bridge import BridgeReceiver, digests_on_device, dtype_name
from vime_hpc.weights.digest import root_digest, tensor_digest
from vime_hpc.weights.disk import DISK, DirectoryGroup, DirectoryReceiver, directory_group
from vime_hpc.weights.engine_layout import RankLayout, Slices
from vime_hpc.weights.ipc import (
    IPC,
    IpcGroup,
    IpcReceiver,
    Opened,
    devices_in_reach,
    ipc_group,
)
from vime_hpc.weights.plan import Bucket, WeightPlan, refuse_unless_complete
from vime_hpc.weights.safetensors_index import tensor_specs
from vime_hpc.weights.staging import Staging

Reply = dict[str, Any]


class WeightReceiver:
    """Mixed into vLLM's worker class; `self` is the worker. State lives in one attribute, `_vime`."""

    # Set by vLLM's own worker.
    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any
    _vime: _State
    _vime_recorded: RankLayout | None = None
    _vime_held: int = 0
    """Bytes of this rank's parameters; 0 before the first load."""

    def vime_guard(self) -> Reply:
        """Tie this process's life to the API server's: a SIGKILLed server left its engine core behind (vLLM 0.30)."""
        return _reply(_guard)

    def vime_device(self) -> Reply:
        """{"device": what this worker computes on, "reach": the GPUs whose memory it can open}, see groups.device_identity."""
        return _reply(
            lambda: {
                "device": device_identity(self.device),
                "reach": devices_in_reach(self.device),
            }
        )

    def vime_join(
        self,
        store_host: str,
        store_port: int,
        epoch: int,
        first_rank: int,
        world: int,
        num_sources: int,
        backend: str,
        timeout_s: float,
        directory: str = "",
        part_of: Sequence[int] = (),
    ) -> Reply:
        """Join the bridge as rank `first_rank` + this worker's rank in the engine.

        Args:
            first_rank: bridge rank of this engine's worker 0.
            world: senders and engine ranks together; num_sources: trainer senders.
            backend: "gloo", "nccl", "ipc" or "disk"; timeout_s: deadline of joining and of every bucket.
            directory: where versions lie ("disk").
            part_of: part of every engine rank (WeightPlan.part_of).
        Returns:
            {"rank": bridge rank, "seconds": …} or {"error": …}.
        """

        def join() -> Reply:
            start = time.perf_counter()
            old = getattr(self, "_vime", None)
            if old is not None:
                old.group.close()
            store = TCPStore(
                store_host, int(store_port), is_master=False, timeout=timedelta(seconds=timeout_s)
            )
            rank = int(first_rank) + int(self.rank)
            where = (store, int(epoch), rank, int(world))
            sizes = (float(timeout_s), int(num_sources))
            group: BridgeGroup
            if backend == IPC:
                group = ipc_group(*where, *sizes, part_of)
            elif backend == DISK:
                group = directory_group(*where, *sizes)
            else:
                group = bridge_group(*where, backend, *sizes, part_of)
            self._vime = _State(group, store, Path(directory))
            return {"rank": rank, "seconds": time.perf_counter() - start}

        return _reply(join)

    def vime_receive(self, plan_json: str, version: int) -> Reply:
        """Receive one full version and load it. An empty plan_json stands for the plan of the call before.

        Returns:
            {"version", "root", "nbytes", "seconds": {phase: s}, "received" and "held": bytes of tensors and of parameters} or {"error": …}; after an error the weights are mixed.
        """
        return _reply(lambda: self._vime_load(plan_json, int(version)))

    def vime_layout(self) -> Reply:
        """What this rank holds of every tensor, learnt by loading the model's own files once more and watching the loader.

        Asked before the first version arrives, while the engine has nothing to do; later the same answer is given.

        Returns:
            {"layout": engine_layout.RankLayout as JSON}, {"whole": why every tensor is to be sent whole}, or {"error": …}.
        """
        return _reply(self._vime_layout)

    def _vime_layout(self) -> Reply:
        model_dir, state = self._vime_model_dir(), getattr(self, "_vime", None)
        if self._vime_recorded is not None:
            return {"layout": self._vime_recorded.to_json()}
        if model_dir is None or not any(model_dir.glob("*.safetensors")):
            return {"whole": "no safetensors files to record a load of"}
        if state is not None and state.digests:
            return {"whole": "the engine holds a version already, and its loader was not recorded"}
        recording = Recording(model_tensors(model_dir))
        self._vime_reload(iter(recording))
        self._vime_recorded = recording.layout(self._vime_held)
        return {"layout": self._vime_recorded.to_json()}

    def vime_prepare(self, version: int) -> Reply:
        """Wait for a version on disk and check all of it while the engine still serves. {"root", "seconds"} or {"error": …}."""

        def prepare() -> Reply:
            state, start = self._vime_state(), time.perf_counter()
            if state.plan is None:
                raise EngineError("no weight plan was given yet")
            receiver = state.receiver(state.plan, self.device)
            if not isinstance(receiver, DirectoryReceiver):
                raise EngineError("only versions on disk can be checked before they are loaded")
            try:
                root = receiver.prepare(int(version))
            except VimeError as error:
                state.group.fail(str(error))
                raise
            return {"root": root, "seconds": time.perf_counter() - start}

        return _reply(prepare)

    def vime_plan(self, plan_json: str) -> Reply:
        """Keep the plan, once its names and shapes are those of this engine's model. {"digest": plan's} or {"error": …}."""
        return _reply(lambda: self._vime_keep_plan(plan_json))

    def _vime_keep_plan(self, plan_json: str) -> Reply:
        state = self._vime_state()
        plan = WeightPlan.from_json(plan_json)
        model_dir = self._vime_model_dir()
        try:
            if model_dir is not None:
                where = f"engine with the model {model_dir.name}"
                refuse_unless_complete(plan.specs(), tensor_specs(model_dir), where=where)
        except VimeError as error:
            state.group.fail(str(error))
            raise
        state.keep(plan)
        return {"digest": plan.digest}

    def _vime_load(self, plan_json: str, version: int) -> Reply:
        state = self._vime_state()
        if plan_json:
            self._vime_keep_plan(plan_json)
        if state.plan is None:
            raise EngineError("no weight plan was given yet")
        start = time.perf_counter()
        # vLLM's reload asks for tensors in inference mode, and memory made in it can only be written in it later on.
        with torch.inference_mode():
            receiver = state.receiver(state.plan, self.device)
            try:
                if state.placement is not None and not isinstance(receiver, DirectoryReceiver):
                    state.placement.load(receiver.receive_buckets(version))
                    if self.device.type == "cuda":
                        torch.cuda.synchronize(self.device)
                else:
                    self._vime_reload(state.as_whole(receiver.receive(version)))
            except DeadlineError as error:
                state.group.fail(str(error))
                raise
            finally:
                receiver.drain(version)  # a loader that failed must not leave the senders waiting
                state.digests = receiver.digests()
        placed = state.placement is not None
        seconds = time.perf_counter() - start
        if state.digests_on_device:
            self._vime_look_for_placement(state)
        timings = asdict(receiver.timings)
        return {
            "version": version,
            "root": root_digest(state.digests),
            "nbytes": int(timings.pop("nbytes")),
            "received": state.received,
            "held": self._vime_held,
            "seconds": {**timings, "total_s": seconds, "placed": float(placed)},
        }

    def _vime_look_for_placement(self, state: _State) -> None:
        """After the first version: can the next ones be copied straight into the parameters?"""
        if state.placement is not None or state.plan is None or state.looked:
            return
        state.looked = True
        if self._vime_receives_own(state.plan):
            found = find_placement(self.model_runner.model, state.buckets)
            if found is not None and found.reads_back(state.buckets, state.digests):
                state.placement = found

    def _vime_receives_own(self, plan: WeightPlan) -> bool:
        """Whether what this rank receives is what it holds: of a whole tensor sent to a shard that is not so."""
        return plan.layout is not None or self.vllm_config.parallel_config.world_size == 1

    def _vime_model_dir(self) -> Path | None:
        """Whose tensor names the plan must match; None = not checked (the stub engine)."""
        return Path(self.vllm_config.model_config.model)

    def _vime_reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        _drop_cpu_moe_kernels(self.model_runner.model)
        with set_current_vllm_config(self.vllm_config), torch.inference_mode():
            self.model_runner.reload_weights(weights_iterator=self._vime_counted(tensors))
            _repack_cpu_tied_head(self.model_runner.model)

    def _vime_counted(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors; notes the bytes of the parameters, which have the form the loader fills only while it asks for tensors."""
        model, held = self.model_runner.model, self._vime_held
        tied = getattr(self.vllm_config.model_config.hf_text_config, "tie_word_embeddings", False)
        for item in tensors:
            if not held:
                # vLLM gives a tied head a parameter of its own while it reloads; nothing is loaded into it.
                own = (
                    p for n, p in model.named_parameters() if not (tied and n == "lm_head.weight")
                )
                held = sum(p.numel() * p.element_size() for p in own)
            yield item
        self._vime_held = held

    def vime_digests(self) -> Reply:
        """{"digests": {name: hex}} of what arrived last, to name the tensors when the root digest is not the sender's."""
        return _reply(lambda: {"digests": self._vime_state().digests})

    def vime_compare(self) -> Reply:
        """Whether this rank's own parameters hold, bit for bit, what arrived last.

        Returns:
            {"compared": number of tensors, "different": their names}, {"cannot": why}, or {"error": …}.
        """
        return _reply(self._vime_compare)

    def _vime_compare(self) -> Reply:
        if self.device.type == "cpu":
            return {
                "cannot": "on the CPU vLLM repacks weights for oneDNN and keeps no plain tensors"
            }
        state = self._vime_state()
        if state.plan is None or not state.digests:
            raise EngineError("no version has arrived yet")
        if not self._vime_receives_own(state.plan):
            return {"cannot": "this rank holds shards of the tensors, and was sent them whole"}
        placement = state.placement or find_placement(self.model_runner.model, state.buckets)
        if placement is None:
            return {
                "cannot": "vLLM lays this model's parameters out in a way that is not known here"
            }
        different = placement.different(
            state.buckets, state.digests, on_device=state.digests_on_device
        )
        return {"compared": len(state.digests), "different": different}

    def vime_readback(self) -> Reply:
        """{"digests": {parameter name: hex}} of this rank's own tensors as they lie in memory (vLLM's names, its shards)."""

        def read() -> Reply:
            if self.device.type == "cpu":
                raise EngineError(
                    "on the CPU vLLM repacks weights for oneDNN and empties the parameters, so they cannot be "
                    "read back; the digest of what arrived and the logprob probe stand in for it"
                )
            named = self.model_runner.model.named_parameters()
            return {
                "digests": {
                    n: tensor_digest(
                        p.detach().contiguous().flatten().view(torch.uint8).cpu().numpy(),
                        dtype_name(p.dtype),
                        tuple(p.shape),
                    )
                    for n, p in named
                }
            }

        return _reply(read)

    def _vime_state(self) -> _State:
        state: _State | None = getattr(self, "_vime", None)
        if state is None:
            raise EngineError("this engine rank has not joined the bridge")
        return state


class _State:
    """What one worker remembers of the bridge between calls."""

    def __init__(self, group: BridgeGroup, store: Store, directory: Path) -> None:
        self.group, self._directory = group, directory
        self.plan: WeightPlan | None = None
        self.received = 0  # bytes of tensors of one version
        self.buckets: tuple[Bucket, ...] = ()
        self._slices: Slices = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._store = store  # the process groups need it alive
        self._memory: dict[int, Opened] = {}  # of senders on this node, opened once
        self._staging: Staging | None = None  # of a bridge whose tensors are copied out at once
        self.digests: dict[str, str] = {}
        self.placement: Placement | None = None
        self.looked = False  # for a placement

    @property
    def digests_on_device(self) -> bool:
        """Whether digests are those of device_digest, and so can be compared with parameters without a copy to the host."""
        # A DirectoryGroup is an IpcGroup, too, and its digests are of bytes.
        return self.group.backend == IPC or digests_on_device(self.group.backend)

    def keep(self, plan: WeightPlan) -> None:
        """Receive by this plan from now on."""
        self.plan, self._slices = plan, {}
        part = 0 if plan.layout is None else self.group.part
        if plan.layout is not None:
            self._slices = plan.layout.parts[part]
            self._shapes = {name: shape for name, (_, shape) in plan.specs().items()}
        self.received, self.buckets = plan.received(part), plan.buckets_of(part)
        self._staging = None

    def as_whole(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What is received as vLLM's loader expects it: of the whole tensors' shapes."""
        return parts_of_whole(tensors, self._slices, self._shapes)

    def receiver(
        self, plan: WeightPlan, device: torch.device
    ) -> BridgeReceiver | IpcReceiver | DirectoryReceiver:
        if isinstance(self.group, DirectoryGroup):
            return DirectoryReceiver(self.group, plan, self._directory)
        if isinstance(self.group, IpcGroup):
            return IpcReceiver(self.group, plan, device=device, opened=self._memory)
        where = device if self.group.backend == "nccl" else torch.device("cpu")
        if self.placement is not None and self._staging is None:
            self._staging = Staging(self.buckets, where)
        return BridgeReceiver(self.group, plan, device=where, memory=self._staging)


def _reply(action: Callable[[], Reply]) -> Reply:
    # The one place where any exception becomes data: it has to cross two process borders, and vLLM drops its text.
    try:
        return action()
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"}


def _guard() -> Reply:
    die_with_parent(signal.SIGKILL)
    return {"pid": os.getpid(), "parent": os.getppid()}


def _drop_cpu_moe_kernels(model: torch.nn.Module) -> None:
    """Have the next load build the MoE kernels anew.

    On the CPU a reload keeps the kernel object and copies plain weights over the prepacked ones: no error, and logprobs
    off by up to 7 (measured, vLLM 0.27.1 … 0.32.0). Without the kernel object the first-load path runs again.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_cpu_tied_head(model: torch.nn.Module) -> None:
    """Have an output layer that shares the embedding's weight take the new one.

    On the CPU a layer multiplies with a copy of its weight packed for oneDNN. A reload packs the layers it loads; a tied
    head is sent no tensor of its own, so it kept the copy of the first load: no error, right digests, and logprobs that
    drift with every update (measured, vLLM 0.30: 0.005 after one step of a small policy, 0.15 after twenty).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    layers = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    embeddings = {m.weight.data_ptr() for m in layers if not isinstance(m, ParallelLMHead)}
    for head in layers:
        if isinstance(head, ParallelLMHead) and head.weight.data_ptr() in embeddings:
            head.quant_method.process_weights_after_loading(head)
