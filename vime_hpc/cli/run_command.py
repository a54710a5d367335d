"""`vime-hpc run`: check what can be checked, run the job on this machine, say where the results are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vime_hpc.cli.preflight import check, keep_foreign_modules_out
from vime_hpc.config.load import load_config
from vime_hpc.launch.finished_buffer import refuse_unfinished
from vime_hpc.launch.local import run_local
from vime_hpc.observe.metrics import read_metrics


def run(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc run`; returns the exit code."""
    config = load_config([Path(path) for path in arguments.configs], arguments.overrides)
    keep_foreign_modules_out()
    check(config, import_plugins=True)
    if arguments.dry_run:
        print(json.dumps(config.model_dump(mode="json"), indent=2))
        return 0
    if config.run.mode == "train_only":
        refuse_unfinished(config, Path(config.run.dir))
    if arguments.json:
        config = config.model_copy(
            update={"observe": config.observe.model_copy(update={"progress": "off"})}
        )
    paths = run_local(config)
    result = summary(paths.root)
    print(json.dumps(result) if arguments.json else _words(result))
    return 0


def summary(root: Path) -> dict[str, Any]:
    """What a finished run has to say: last step, rewards before and after, where things are."""
    records = read_metrics(root / "metrics.jsonl")
    mode = json.loads((root / "config.json").read_text())["run"]["mode"]
    evaluations = read_metrics(root / "eval" / "metrics.jsonl")
    return {
        "run": str(root),
        "mode": mode,
        "steps": records[-1]["step"] + 1 if records else 0,
        "last": records[-1] if records else {},
        "eval": [{"version": e["step"], "reward": e.get("eval/reward")} for e in evaluations],
        "export": str(root / "export"),
        "buffer": str(root / "buffer"),
        "tensorboard": str(root / "tensorboard"),
    }


def _words(result: dict[str, Any]) -> str:
    what = {"train_only": " trained", "rollout_only": " of rollouts"}.get(result["mode"], "")
    lines = [f"done: {result['steps']} steps{what} in {result['run']}"]
    lines += [
        f"  held-out reward at weight version {e['version']}: {e['reward']:.3f}"
        for e in result["eval"]
        if e["reward"] is not None
    ]
    places = {
        "policy": result["export"],
        "rollouts": result["buffer"],
        "metrics": f"{result['run']}/metrics.jsonl",
    }
    lines += [f"  {name:<11} {path}" for name, path in places.items() if Path(path).exists()]
    if Path(result["tensorboard"]).exists():
        lines[-1] += f", tensorboard --logdir {result['tensorboard']}"
    return "\n".join(lines)
