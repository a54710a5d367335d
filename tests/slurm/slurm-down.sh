#!/usr/bin/env bash
# End exactly the daemons that slurm-up.sh started, by the pid files under SLURM_DEV_HOME.
# --wipe removes the folder too.
set -uo pipefail
home=${SLURM_DEV_HOME:-${TMPDIR:-/tmp}/slurm-dev}
export SLURM_CONF=$home/etc/slurm.conf
comm_is() { # comm_is PID NAME: it runs, is no zombie and is that program
  awk -v n="$2" '/^Name:/{ok = index($2, n) == 1} /^State:/{ok = ok && $2 != "Z"} END{exit !ok}' "/proc/$1/status" 2>/dev/null
}
if [ -s "$home/run/slurmctld.pid" ] && comm_is "$(cat "$home/run/slurmctld.pid")" slurmctld; then
  squeue -h -o %A 2>/dev/null | sort -u | while read -r j; do scancel -f "$j" 2>/dev/null; done
  for _ in $(seq 100); do [ -z "$(squeue -h 2>/dev/null)" ] && break; sleep 0.1; done
fi
pids=()
term() { # term PIDFILE NAME
  local p; p=$(cat "$1" 2>/dev/null) || return 0
  [ -n "$p" ] && comm_is "$p" "$2" && kill "$p" 2>/dev/null && pids+=("$p:$2")
}
gone() { # wait up to 10 s for all that were told to end, then kill what is left
  local pn left
  for _ in $(seq 100); do
    left=0; for pn in ${pids[@]+"${pids[@]}"}; do comm_is "${pn%%:*}" "${pn#*:}" && left=1; done
    [ $left = 0 ] && return 0
    sleep 0.1
  done
  for pn in ${pids[@]+"${pids[@]}"}; do comm_is "${pn%%:*}" "${pn#*:}" && kill -9 "${pn%%:*}" 2>/dev/null; done
}
# munged last: the others still sign their good-byes with it
for f in "$home"/run/slurmd-*.pid; do [ -e "$f" ] && term "$f" slurmd; done
term "$home/run/slurmctld.pid" slurmctld
gone; pids=()
term "$home/run/slurmdbd.pid" slurmdbd
gone; pids=()
term "$home/run/munged.pid" munged
term "$home/run/mariadbd.pid" mariadbd
gone
if [ -w /etc/hosts ] && grep -qF "# slurm-dev $home" /etc/hosts; then
  # in place: /etc/hosts may be a mount, which cannot be renamed over
  kept=$(grep -vF "# slurm-dev $home" /etc/hosts); printf '%s\n' "$kept" > /etc/hosts
fi
rm -f "$home"/run/*.pid
br=$(cat "$home/run/bridge" 2>/dev/null) # only what this cluster made: another may be up
rm -f "$home/run/bridge"
if [ -n "$br" ] && ip link show "$br" >/dev/null 2>&1; then
  # links first: a process that is still ending keeps a namespace, and its link, after the name is gone
  for link in $(ip -o link show master "$br" | awk -F'[ :@]+' '{print $2}'); do ip link del "$link"; done
  for ns in $(ip netns list 2>/dev/null | awk -v b="$br-" 'index($1, b) == 1 {print $1}'); do ip netns del "$ns"; done
  ip link del "$br"
fi 2>/dev/null
[ "${1:-}" = --wipe ] && rm -rf "$home"
exit 0
