#!/usr/bin/env bash
# Makes .venv with the CPU stack: bash tools/install.sh [run|test]. A second call finds everything there and returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-run}
venv=${VIME_VENV:-.venv}
python=${PYTHON:-python3}
# Where pip's own sources have no CPU build of torch (a plain machine), it comes from PyTorch's index of CPU builds.
PYTORCH_CPU_INDEX=${PYTORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
TORCH=torch==2.13.0+cpu

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "install.sh: $python is missing or older than Python 3.11; name another one with PYTHON=/path/to/python3.11" >&2
    exit 2
fi
lists=(tools/requirements-cpu.txt)
[ "$what" = test ] && lists+=(tools/requirements-test.txt)
stamp=$(cat "${lists[@]}" tools/install.sh setup.cfg | sha256sum | cut -d' ' -f1)
if [ -f "$venv/.installed-$what" ] && [ "$(cat "$venv/.installed-$what")" = "$stamp" ]; then
    exit 0
fi

began=$SECONDS
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps)
echo "installing into $venv (once; about two minutes on two cores) ..."
if ! "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__ != '${TORCH#torch==}')" 2>/dev/null; then
    "${pip[@]}" "$TORCH" 2>/dev/null || "${pip[@]}" --index-url "$PYTORCH_CPU_INDEX" "$TORCH"
fi
for list in "${lists[@]}"; do
    "${pip[@]}" --requirement "$list"
done
"${pip[@]}" --no-build-isolation --editable .
echo "$stamp" > "$venv/.installed-$what"
echo "installed in $((SECONDS - began)) s, $(du -sh "$venv" | cut -f1)"
