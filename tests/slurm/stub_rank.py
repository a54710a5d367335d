"""A rank program without a model, for the launcher's tests: the entry, environment, files and exit codes of
`python -m vime_hpc.roles RUN`, the real loops and the real buffer, and steps of a fraction of a second.

Weights are one integer in ATTEMPT/version. The trainer's checkpoint is the list of what it trained: (step, content
digest of the batch, lag), so that a batch lost, trained twice or generated otherwise shows in the last one.
RUN/generated.log has a line for every prompt group made; a group is logged after the buffer acknowledged it, so that a
line that comes twice is work that a restart has done again.

STUB_STEP_S: seconds a step takes. STUB_FAULT: json {"rank": name, "step": n, "do": "exit 7" | "kill" | "hang" | "config"
| "ignore warning"}, done in the first attempt only unless "starts" names more of them.
"hold" is for a rollout worker: amid the n-th step it generates it waits until it is told to stop or killed, so that a test's
event comes before the end of the run however slow the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vime_hpc.cluster.signal_flag import SignalFlag

WARNING = SignalFlag()

from stub_work import GROUPS_PER_STEP, generated, group_ids, state_after  # noqa: E402

from vime_hpc.buffer.reader import BufferReader, StepBatch  # noqa: E402
from vime_hpc.buffer.store import RolloutBuffer  # noqa: E402
from vime_hpc.buffer.writer import BufferWriter  # noqa: E402
from vime_hpc.cluster.rank import RankInfo, rank_info  # noqa: E402
from vime_hpc.config.load import read_resolved  # noqa: E402
from vime_hpc.config.paths import RunPaths  # noqa: E402
from vime_hpc.errors import ConfigError, DeadlineError, RequeueRequested, VimeError  # noqa: E402
from vime_hpc.loop import RolloutSide, TrainerSide, rollout_loop, trainer_loop  # noqa: E402
from vime_hpc.observe.failure import tail, write_failure  # noqa: E402
from vime_hpc.observe.metrics import MetricsWriter  # noqa: E402
from vime_hpc.protocols import Metrics  # noqa: E402
from vime_hpc.types import PromptGroup  # noqa: E402

STEP_S = float(os.environ.get("STUB_STEP_S", "0.1"))
FAULT = json.loads(os.environ.get("STUB_FAULT", "null"))
WAIT_S = 300.0


class Stub:
    def __init__(self, run: str) -> None:
        self.paths = RunPaths(Path(run))
        self.config = read_resolved(self.paths.config)
        self.rank: RankInfo = rank_info(self.config)
        self.attempt = self.paths.attempt(self.rank.attempt)
        self.write_place()

    def write_place(self) -> None:
        keys = (
            "SLURM_PROCID",
            "SLURM_LOCALID",
            "CUDA_VISIBLE_DEVICES",
            "OMP_NUM_THREADS",
            "VIME_STOP_AT",
        )
        self.write(
            self.attempt / "places" / f"{self.rank.name}.json",
            {
                "host": socket.gethostname(),
                "global_rank": self.rank.global_rank,
                "world_size": self.rank.world_size,
                "local_rank": self.rank.local_rank,
                "cpus": sorted(os.sched_getaffinity(0)),
                "pid": os.getpid(),
                **{key: os.environ.get(key) for key in keys},
            },
        )

    @staticmethod
    def write(path: Path, value: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(value))
        os.replace(part, path)

    @staticmethod
    def read(path: Path) -> Any:
        return json.loads(path.read_text())

    def stopped(self) -> bool:
        if WARNING.is_set() and not self.ignores_warning():
            (self.attempt / "stop").touch()
        return (self.attempt / "stop").exists()

    def ignores_warning(self) -> bool:
        return bool(FAULT) and FAULT["do"] == "ignore warning" and self.is_faulty_start()

    def is_faulty_start(self) -> bool:
        starts = len(list((self.paths.root / "attempts").iterdir()))
        return starts <= int(FAULT.get("starts", 1))

    def is_due(self, step: int) -> bool:
        return (
            bool(FAULT)
            and FAULT["rank"] == self.rank.name
            and FAULT["step"] == step
            and self.is_faulty_start()
        )

    def fault(self, step: int) -> None:
        if not self.is_due(step):
            return
        if FAULT["do"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT["do"] == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a mask would hold for this thread alone
            time.sleep(600)
        if FAULT["do"] == "config":
            raise ConfigError("option x is wrong; set it right")
        if FAULT["do"].startswith("exit"):
            raise RuntimeError("the stub was told to fail")

    def wait(self, is_there: Callable[[], bool], what: str) -> None:
        """Raises RequeueRequested when told to stop meanwhile, DeadlineError after WAIT_S."""
        end = time.monotonic() + WAIT_S
        while not is_there():
            if self.stopped():
                raise RequeueRequested(f"told to stop while waiting for {what}")
            if time.monotonic() > end:
                raise DeadlineError(f"{self.rank.name}: {what} did not come within {WAIT_S:g} s")
            time.sleep(0.01)

    def opened(self) -> RolloutBuffer:
        return RolloutBuffer.create(self.paths.buffer, run_id="stub", durable=False)

    def run(self) -> None:
        """The engine has nothing to do until the last step is trained."""
        buffer = self.opened()
        while not (self.attempt / "trained").exists():
            # looked at now and then, so its step may have gone by
            self.fault(min(len(buffer.steps()), FAULT["step"] if FAULT else 0))
            if self.stopped():
                raise RequeueRequested("told to stop")
            time.sleep(0.05)


class StubTrainer(Stub):
    """Every part of the trainer side. Rank 0 alone publishes, saves and logs."""

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self.trained: list[tuple[int, str, int]] = []
        self.leads = self.rank.role_rank == 0
        self.metrics = MetricsWriter(self.paths.metrics, None, self.rank.attempt)

    def restore(self) -> int:
        commits = sorted(self.paths.checkpoints.glob("step-*/commit.json"))
        if commits:
            self.trained = [tuple(entry) for entry in self.read(commits[-1])["trained"]]
        return len(self.trained)

    def publish(self, version: int) -> Metrics:
        if self.leads:
            self.write(self.attempt / "version", version)
        return {}

    def wait_for(self, step: int) -> StepBatch | None:
        reader = BufferReader(self.paths.buffer)
        try:
            self.wait(lambda: step in reader.committed_steps(), f"the batch of step {step}")
        except RequeueRequested:
            return None
        return reader.batch(step)

    def step(self, batch: StepBatch) -> Metrics:
        self.fault(batch.step)
        time.sleep(STEP_S)
        lag = batch.step - int(batch.table.weight_version.min())
        self.trained.append((batch.step, batch.content_digest(), lag))
        return {"train/lag": float(lag)}

    def agreed(self) -> bool:
        return self.stopped()

    def save_if_due(self, next_step: int, *, force: bool = False) -> Metrics:
        if self.leads and (force or next_step % self.config.checkpoint.interval == 0):
            commit = {
                "format": 1,
                "next_step": next_step,
                "weight_version": next_step,
                "state": state_after(self.trained),
                "trained": self.trained,
                "files": [],
            }
            self.write(self.paths.checkpoints / f"step-{next_step:06d}" / "commit.json", commit)
        return {}

    def log(self, step: int, metrics: Mapping[str, float], batch: StepBatch) -> None:
        if self.leads:
            self.metrics.write(step, metrics)

    def run(self) -> None:
        self.opened()
        trainer_loop(TrainerSide(self.config.run.num_steps, self, self, self, self, self, self))
        self.write(self.attempt / "trained", True)


class StubRollout(Stub):
    """Every part of the rollout side."""

    buffer: BufferWriter
    generating = -1
    """Which step of this start is being generated, counted from 0."""

    def receive(self, at_least: int) -> int:
        path = self.attempt / "version"
        self.wait(lambda: path.exists() and self.read(path) >= at_least, f"version {at_least}")
        return int(self.read(path))

    def leave(self) -> None:
        """Nothing joins what is published here."""

    def evaluate_if_due(self, version: int, *, last: bool = False) -> None:
        """No evaluation."""

    def hold(self) -> None:
        if self.is_due(self.generating) and FAULT["do"] == "hold":
            self.wait(lambda: False, "the end of the hold")

    def generate(self, step: int, version: int) -> tuple[list[PromptGroup], Metrics]:
        self.fault(step)
        self.generating += 1
        groups = {group.group_id: group for group in self.buffer.recovered_groups(step)}
        for group_id in group_ids(step, self.rank.role_rank, self.rank.role_size):
            if group_id in groups:
                continue
            if len(groups) == GROUPS_PER_STEP // 2:
                self.hold()
            time.sleep(STEP_S / 2 / GROUPS_PER_STEP)
            groups[group_id] = generated(self.buffer.schema, group_id, version)
            self.buffer.journal_group(step, groups[group_id])
            with (self.paths.root / "generated.log").open("a") as log:
                log.write(f"{group_id}\n")
        return [group for _, group in sorted(groups.items())], {}

    def state(self) -> Mapping[str, Any]:
        return {}

    def run(self) -> None:
        with BufferWriter(
            self.paths.buffer,
            worker=self.rank.role_rank,
            num_workers=self.rank.role_size,
            attempt=self.buffer_attempt(),
            durable=False,
        ) as self.buffer:
            steps, lag = self.config.run.num_steps, self.config.rollout.max_weight_lag
            rollout_loop(RolloutSide(steps, lag, self.buffer, self, self, self))
        self.wait((self.attempt / "trained").exists, "the end of training")

    def buffer_attempt(self) -> int:
        """Of all workers of this start: worker 0 says it."""
        buffer, path = self.opened(), self.attempt / "buffer_attempt"
        if self.rank.role_rank == 0:
            self.write(path, buffer.next_attempt())
        self.wait(path.exists, "worker 0")
        return int(self.read(path))


ROLES = {"trainer": StubTrainer, "engine": Stub, "rollout": StubRollout}


def main(run: str) -> int:
    stub = ROLES[rank_info(read_resolved(RunPaths(Path(run)).config)).role](run)
    print(f"{stub.rank.name} is up, warned: {WARNING.is_set()}", flush=True)
    try:
        stub.run()
        return 0
    except RequeueRequested as stop:
        return stop.exit_code
    except (VimeError, RuntimeError) as error:
        lines = tail(stub.attempt / "logs" / f"{stub.rank.name}.log")
        write_failure(stub.attempt / "failures", stub.rank.name, error, last_lines=lines)
        if FAULT and FAULT["do"].startswith("exit"):
            return int(FAULT["do"].split()[1])
        return error.exit_code if isinstance(error, VimeError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
