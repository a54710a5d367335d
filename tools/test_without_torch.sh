#!/usr/bin/env bash
# Runs the torch-free tests in a virtual environment that lacks torch, vllm and megatron, to prove the layers.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VIME_LIGHT_VENV:-.venv-light}
stamp=$(sha256sum tools/requirements-light.txt setup.cfg | sha256sum)
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$stamp" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check -q install --no-deps -r tools/requirements-light.txt
    "$venv/bin/python" -m pip --disable-pip-version-check -q install --no-deps --no-build-isolation -e .
    echo "$stamp" > "$venv/.installed"
fi
if "$venv/bin/python" -c "import torch" 2>/dev/null; then
    echo "test_without_torch.sh: torch is importable from $venv, so this proves nothing; remove $venv" >&2
    exit 1
fi
"$venv/bin/python" -m pytest -q -p no:cacheprovider tests/unit --light
