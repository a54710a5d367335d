#!/usr/bin/env bash
# Sets up what the tests need and runs them all: bash tools/test.sh [pytest arguments]
# Where root and apt are at hand, Slurm is installed for tests/slurm; elsewhere those tests are left out, and that is said.
# With CI=true a missing part is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VIME_VENV:-.venv}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

install_slurm() {
    command -v slurmctld >/dev/null && command -v h5dump >/dev/null && command -v ip >/dev/null &&
        command -v strace >/dev/null && command -v mkfs.ext4 >/dev/null && return 0
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    # The packages' own daemons must not start: the tests bring up theirs with their own configuration.
    local policy=/usr/sbin/policy-rc.d
    [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' > "$policy"; chmod +x "$policy"; }
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        slurmctld slurmd slurm-client munge iproute2 hdf5-tools strace e2fsprogs >/dev/null
}

bash tools/install.sh test
selection="not gpu"
if ! install_slurm; then
    if [ "${CI:-}" = true ]; then
        echo "test.sh: Slurm could not be installed (root and apt are needed), and CI=true allows no test to be left out" >&2
        exit 1
    fi
    selection="not gpu and not slurm"
    echo "test.sh: tests/slurm do NOT run: Slurm is not installed, and installing it needs root and apt"
fi
"$venv/bin/ruff" check .
"$venv/bin/mypy"
"$venv/bin/lint-imports"
# The layers hold: what needs no torch is tested where torch does not exist.
bash tools/test_without_torch.sh
exec "$venv/bin/python" -m pytest -m "$selection" "$@"
