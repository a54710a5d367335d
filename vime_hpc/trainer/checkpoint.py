"""Checkpoints: model, optimizer, schedule, random states and the step frontier as one transaction.

RUN/checkpoints/step-000100/
    rank-0000.safetensors   the boxes each rank is the first holder of (shards.py), its random states
    commit.json             written last: next_step, layout, plain optimizer state, and of every file
                            its size, XXH3-128 and the boxes in it
Everything is written in step-000100.tmp, flushed, and renamed: a directory without commit.json is
never read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state as mpu, tensor_parallel
from safetensors.torch import save_file
from torch import Tensor

from vime_hpc.config.parts import CheckpointConfig
from vime_hpc.errors import CheckpointCorruptError, ConfigError
from vime_hpc.protocols import Metrics
from vime_hpc.trainer.shards import StoredBoxes, boxes_to_save, decode, encode, entries, fill
from vime_hpc.trainer.step import MegatronTrainer

COMMIT = "commit.json"
FORMAT = 1
_STEP = re.compile(r"step-(\d{6,})")

log = logging.getLogger(__name__)


class MegatronCheckpoints:
    """Saves and restores a MegatronTrainer; implements protocols.CheckpointKeeper. Every method is
    collective.
    """

    def __init__(
        self, root: Path, trainer: MegatronTrainer, config: CheckpointConfig, *, num_steps: int
    ) -> None:
        """
        Args:
            root: RUN/checkpoints, on a file system all trainer ranks see.
            num_steps: of the run; the last step is always saved.
        """
        self._root = root
        self._trainer = trainer
        self._config = config
        self._num_steps = num_steps
        self._saved: int | None = None

    def restore(self) -> int:
        """Load the newest complete checkpoint; returns the next step to train, 0 where there is
        none.

        Incomplete or damaged ones are passed over with a warning that says why.

        Raises:
            CheckpointCorruptError: there are committed checkpoints, but every one is damaged.
        """
        committed, damaged = _candidates(self._root)
        for step in committed:
            folder = self._root / name_of(step)
            problem = self._problem(folder)
            if problem is None:
                self._load(folder)
                self._saved = step
                return step
            damaged.append(f"{folder.name}: {problem}")
            if dist.get_rank() == 0:
                log.warning("checkpoint passed over: %s: %s", folder, problem)
        if committed:
            raise CheckpointCorruptError(
                f"{self._root}: none of {len(damaged)} checkpoints can be used ({'; '.join(damaged)}). To start again from "
                "the initial policy, move the directory away"
            )
        return 0

    def save_if_due(self, next_step: int, *, force: bool = False) -> Metrics:
        """Save as the state before step `next_step`, when the interval says so, at the end, or when
        forced.
        """
        interval = self._config.interval
        due = (
            force
            or next_step == self._num_steps
            or (interval > 0 and next_step > 0 and next_step % interval == 0)
        )
        if not due or next_step == self._saved:
            return {}
        started = time.perf_counter()
        self._save(next_step)
        self._saved = next_step
        return {"perf/save_time": time.perf_counter() - started}

    # --- saving ------------------------------------------------------------------------------------

    def _save(self, next_step: int) -> None:
        final = self._root / name_of(next_step)
        aside = self._root / f"{name_of(next_step)}.tmp"
        leads = dist.get_rank() == 0
        if leads:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        dist.barrier()
        boxes, common = self._boxes()
        file = aside / f"rank-{dist.get_rank():04d}.safetensors"
        save_file({name: tensor.contiguous().cpu() for name, tensor in boxes.items()}, file)
        _fsync(file)
        mine = {
            "name": file.name,
            "bytes": file.stat().st_size,
            "xxh3_128": _digest(file),
            "boxes": dict(entries(file)),
        }
        files: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(files, mine)
        if leads:
            commit = {
                "format": FORMAT,
                "next_step": next_step,
                "weight_version": next_step,
                "layout": self._layout(),
                "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "schedule": self._trainer.scheduler.state_dict(),
                "common": encode(common),
                "files": files,
            }
            (aside / COMMIT).write_text(json.dumps(commit), encoding="utf-8")
            _fsync(aside / COMMIT)
            _fsync(aside)
            shutil.rmtree(final, ignore_errors=True)  # only a damaged one can stand there
            aside.rename(final)
            _fsync(self._root)
            self._prune(next_step)
        dist.barrier()

    def _boxes(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        boxes: dict[str, Tensor] = {}
        common: dict[str, Any] = {}
        for section, state in self._states(is_loading=False).items():
            part, common[section] = boxes_to_save(section, state)
            boxes |= part
        for name, random_state in _random_states().items():
            boxes[f"random-{dist.get_rank()}:{name}@0"] = random_state
        return boxes, common

    def _states(self, *, is_loading: bool) -> dict[str, dict[str, Any]]:
        """Megatron's sharded state dicts by section; the optimizer's refers to the model's, so they
        go together.
        """
        trainer = self._trainer
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
            "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        }
        model = trainer.model.module.sharded_state_dict(metadata=metadata)
        optimizer = trainer.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        states = {"policy": {"model": model, "optimizer": optimizer}}
        if trainer.reference is not None:
            states["reference"] = {
                "model": trainer.reference.module.sharded_state_dict(metadata=metadata)
            }
        return states

    def _layout(self) -> dict[str, int]:
        ranks = self._trainer.model.ranks
        return {
            "num_ranks": dist.get_world_size(),
            "tp": ranks.tp_size,
            "pp": ranks.pp_size,
            "dp": ranks.dp_size,
            "ep": mpu.get_expert_model_parallel_world_size(),
            "distributed_optimizer": int(self._sharded_optimizer),
        }

    @property
    def _sharded_optimizer(self) -> bool:
        return bool(self._trainer.model.wrapped.ddp_config.use_distributed_optimizer)  # type: ignore[union-attr]

    def _prune(self, newest: int) -> None:
        committed, _ = _candidates(self._root)
        for step in [s for s in committed if s != newest][self._config.keep - 1 :]:
            folder = self._root / name_of(step)
            (
                folder / COMMIT
            ).unlink()  # first, so that a kill in between leaves nothing that looks complete
            shutil.rmtree(folder)
        for left in self._root.glob("step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)

    # --- loading -----------------------------------------------------------------------------------

    def _problem(self, folder: Path) -> str | None:
        """Why this checkpoint cannot be used, None if it can; the ranks share the reading.
        Collective.
        """
        mine = None
        try:
            files = read_commit(folder)["files"]
            for entry in files[dist.get_rank() :: dist.get_world_size()]:
                mine = mine or _file_problem(folder / entry["name"], entry)
        except CheckpointCorruptError as error:
            mine = str(error)
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, mine)
        return next((problem for problem in problems if problem), None)

    def _load(self, folder: Path) -> None:
        commit = read_commit(folder)
        stored = StoredBoxes(folder, {entry["name"]: entry["boxes"] for entry in commit["files"]})
        common = decode(commit["common"])
        trainer = self._trainer
        saved, present = (
            bool(layout["distributed_optimizer"]) for layout in (commit["layout"], self._layout())
        )
        if saved != present:
            raise ConfigError(
                f"{folder} was saved with trainer.distributed_optimizer = {str(saved).lower()}; Megatron-Core stores the two "
                f"kinds differently. Set trainer.distributed_optimizer = {str(saved).lower()} (tp, pp and dp may change)"
            )
        for section, request in self._states(is_loading=True).items():
            state = fill(section, request, common[section], stored)
            model = trainer.model if section == "policy" else trainer.reference
            assert model is not None
            model.module.load_state_dict(state["model"])
            if section == "policy":
                if not self._sharded_optimizer:
                    _name_step_zero(state["optimizer"])
                configured = _configured(trainer.optimizer)
                trainer.optimizer.load_state_dict(state["optimizer"])
                for group, options in zip(trainer.optimizer.param_groups, configured, strict=True):
                    group.update(options)
        trainer.scheduler.load_state_dict(commit["schedule"])
        if commit["layout"] == self._layout():
            _set_random_states(
                {
                    name: stored.exact(f"random-{dist.get_rank()}:{name}")
                    for name in _random_states()
                }
            )
        if dist.get_rank() == 0:
            log.info("restored %s (saved with layout %s)", folder, commit["layout"])


def _configured(optimizer: Any) -> list[dict[str, Any]]:
    """What [optimizer] says of each parameter group: a checkpoint holds it too, and would win over the configuration."""
    names = ("max_lr", "min_lr", "betas", "eps")
    return [
        {name: group[name] for name in names if name in group} for group in optimizer.param_groups
    ]


def _name_step_zero(state: Any) -> None:
    """Put back a step counter of zero: Megatron-Core leaves it out of a sharded state (`if step:`), and torch needs it."""
    if not isinstance(state, dict):
        return
    moments = state.get("state")
    if isinstance(moments, dict) and "param_groups" in state:
        if moments and "common_step" not in moments:
            moments["common_step"] = torch.tensor(0.0)
        return
    for part in state.values():
        _name_step_zero(part)


def name_of(step: int) -> str:
    """Directory name of the checkpoint before step `step`."""
    return f"step-{step:06d}"


def read_commit(folder: Path) -> dict[str, Any]:
    """A checkpoint's commit.

    Raises:
        CheckpointCorruptError: not readable, or of a newer format.
    """
    try:
        commit = json.loads((folder / COMMIT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointCorruptError(f"{folder / COMMIT} cannot be read ({error})") from error
    if commit.get("format") != FORMAT:
        raise CheckpointCorruptError(
            f"{folder}: format {commit.get('format')!r}, this version reads {FORMAT}"
        )
    return commit  # type: ignore[no-any-return]


def _candidates(root: Path) -> tuple[list[int], list[str]]:
    """Steps of committed checkpoints, newest first; incomplete ones are named in the log."""
    committed, incomplete = [], []
    for folder in sorted(root.glob("step-*")) if root.is_dir() else []:
        match = _STEP.fullmatch(folder.name)
        if match and (folder / COMMIT).is_file():
            committed.append(int(match[1]))
        else:
            incomplete.append(f"{folder.name}: no {COMMIT}, the writer was stopped before the end")
    if incomplete and dist.get_rank() == 0:
        log.warning("checkpoints passed over in %s: %s", root, "; ".join(incomplete))
    return sorted(committed, reverse=True), incomplete


def _file_problem(file: Path, entry: dict[str, Any]) -> str | None:
    if not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != entry["bytes"]:
        return f"{file.name} has {file.stat().st_size} bytes, its commit says {entry['bytes']}"
    if _digest(file) != entry["xxh3_128"]:
        return f"{file.name} does not have the digest of its commit"
    return None


def _random_states() -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {
        f"megatron-{name}": state for name, state in tracker.items() if isinstance(state, Tensor)
    }


def _set_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    known = tracker.get_states()
    tracker.set_states(
        known
        | {
            name.removeprefix("megatron-"): state
            for name, state in states.items()
            if name.startswith("megatron-")
        }
    )


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while chunk := opened.read(8 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
