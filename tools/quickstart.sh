#!/usr/bin/env bash
# The whole of vime_hpc on this machine's CPU, every part real: bash tools/quickstart.sh
# Makes .venv, installs the CPU stack, makes prompts and a small policy, warms it up, trains it by reinforcement learning,
# prints where the results are. A second call reuses what is there and goes on where a killed one stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
began=$SECONDS
out=${QUICKSTART_DIR:-runs/quickstart}
seed=${QUICKSTART_SEED:-1}
venv=${VIME_VENV:-.venv}

bash tools/install.sh run
vime_hpc="$venv/bin/vime-hpc"
mkdir -p "$out"

# Sums of three numbers from reasoning-gym: 1,067 prompts to train on, 256 others held out.
if [ ! -f "$out/data/eval.jsonl" ]; then
    "$vime_hpc" data make --out "$out/data" --task basic_arithmetic --num-train 1067 --num-eval 256 --seed 7 \
        --task-option min_terms=3 --task-option max_terms=3 --task-option min_digits=1 --task-option max_digits=1 \
        --task-option 'operators=["+"]' --task-option allow_parentheses=false --task-option allow_negation=false
fi
# Demonstrations in two styles; the verifier accepts only the one without a full stop, which is for GRPO to find out.
if [ ! -f "$out/data/warmup.jsonl" ]; then
    "$vime_hpc" data demonstrate "$out/data/train.jsonl" --out "$out/data/warmup.jsonl" --copies 8 \
        --style '{answer}=0.4' --style '{answer}.=0.6'
fi
if [ ! -f "$out/model-$seed/config.json" ]; then
    "$vime_hpc" data model --out "$out/model-$seed" --seed "$seed" --hidden 192 --layers 2 --intermediate 768 \
        --initializer-range 0.05 --tie-embeddings
fi

# `vime-hpc run` ends with 4 when a run is already complete: that is what a second call wants.
stage() {
    local name=$1
    shift
    echo "== $name"
    local code=0
    "$vime_hpc" run "$@" || code=$?
    if [ "$code" != 0 ] && [ "$code" != 4 ]; then
        exit "$code"
    fi
}
common=(--run.seed="$seed" --data.train="$out/data/train.jsonl" --data.eval="$out/data/eval.jsonl")
stage "supervised warm-up" configs/recipes/quickstart.toml configs/recipes/quickstart-warmup.toml "${common[@]}" \
    --model.path="$out/model-$seed" --data.train="$out/data/warmup.jsonl" --run.dir="$out/warmup-$seed"
stage "reinforcement learning" configs/recipes/quickstart.toml "${common[@]}" \
    --model.path="$out/warmup-$seed/export" --run.dir="$out/grpo-$seed"

cat <<END
finished in $((SECONDS - began)) s. Look at it:
  rollouts     $vime_hpc buffer show $out/grpo-$seed --step 39
  metrics      $venv/bin/tensorboard --logdir $out/grpo-$seed/tensorboard
  the policy   $out/grpo-$seed/export (Hugging Face form)
Change something (every option: docs/config.md), into a run directory of its own:
  $vime_hpc run configs/recipes/quickstart.toml ${common[*]} \\
    --model.path=$out/warmup-$seed/export --rollout.max_weight_lag=1 --run.dir=$out/ahead-$seed
END
