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
# An environment that another checkout made (VIME_VENV) runs that checkout's code, and is not ours to install into.
where='import os, vime_hpc; print(os.path.dirname(os.path.dirname(vime_hpc.__file__)))'
owner=$(env -u PYTHONPATH "$venv/bin/python" -P -c "$where" 2>/dev/null || true)
shared=no
if [ -n "$owner" ] && [ -f "$owner/tools/install.sh" ] && ! [ "$owner" -ef . ]; then
    shared=yes
fi
stamp=$(cat "${lists[@]}" tools/install.sh setup.cfg | sha256sum | cut -d' ' -f1)
if [ -f "$venv/.installed-$what" ] && [ "$(cat "$venv/.installed-$what")" = "$stamp" ]; then
    if [ $shared = yes ] && ! [ "$("$venv/bin/python" -P -c "$where")" -ef . ]; then
        echo "install.sh: $venv runs the code of $owner. To run this checkout's: export PYTHONPATH=$PWD" >&2
    fi
    exit 0
fi
if [ $shared = yes ]; then
    echo "install.sh: $venv is the environment of $owner, which needs other packages than this checkout; make one of its own:" \
        "unset VIME_VENV, or name a new directory with it" >&2
    exit 2
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
