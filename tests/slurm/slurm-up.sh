#!/usr/bin/env bash
# Start a private, throw-away Slurm cluster on this one host, without systemd.
# Idempotent: a second call with the cluster up prints the environment and exits 0.
#   . <(./slurm-up.sh --print-env)      to use it from a shell
# Knobs (environment): SLURM_DEV_HOME, SLURM_DEV_NODES, SLURM_DEV_CPUS, SLURM_DEV_GPUS,
#   SLURM_DEV_MEM_MB, SLURM_DEV_PORT, SLURM_DEV_AUTH (munge|none),
#   SLURM_DEV_ACCT (0|1: 1 adds a private mariadbd and slurmdbd, so that sacct answers;
#     packages slurmdbd mariadb-server-core mariadb-client-core)
#   SLURM_DEV_TASK (TaskPlugin; task/affinity binds, and only works where SLURM_DEV_CPUS is what the host really has)
#   SLURM_DEV_SCHED (more SchedulerParameters, as disable_hetjob_steps), SLURM_DEV_BRIDGE, SLURM_DEV_NET (name and /24 of the bridge)
#   SLURM_DEV_NETNS (0|1: 1, as root with iproute2, gives each node a network namespace with an address
#     and a host name of its own, so that a wrong MASTER_ADDR or a socket bound to loopback really fails)
# Ports used, on loopback (or the bridge): PORT (slurmctld), PORT+4 (slurmdbd), PORT+5 (mariadbd), PORT+10.. (slurmd)
# As root it adds the node names to /etc/hosts (127.0.1.10 and up, NET.10 and up), as MASTER_ADDR needs; slurm-down.sh takes them
# out. SLURM_DEV_HOSTS=0 leaves that file alone: for a second cluster beside one that is up, with a home and a PORT of its own.
set -euo pipefail
home=${SLURM_DEV_HOME:-${TMPDIR:-/tmp}/slurm-dev}
nodes=${SLURM_DEV_NODES:-4}
cpus=${SLURM_DEV_CPUS:-16}
gpus=${SLURM_DEV_GPUS:-8}
mem=${SLURM_DEV_MEM_MB:-$(awk '/MemTotal/{print int($2/1024)}' /proc/meminfo)}
port=${SLURM_DEV_PORT:-26800}
auth=${SLURM_DEV_AUTH:-munge}
acct=${SLURM_DEV_ACCT:-0}
netns=${SLURM_DEV_NETNS:-0}
net=${SLURM_DEV_NET:-10.213.0}   # /24 of the bridge, NETNS=1 only
br=${SLURM_DEV_BRIDGE:-sdev0}
user=$(id -un)
host=$(hostname -s)
export PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$home/etc/slurm.conf

print_env() { echo "export SLURM_CONF='$home/etc/slurm.conf'"; }
if [ "${1:-}" = --print-env ]; then print_env; exit 0; fi

for b in slurmctld slurmd sinfo scontrol; do
  command -v $b >/dev/null || { echo "slurm-up: $b is missing (packages slurmctld slurmd slurm-client munge)" >&2; exit 3; }
done

alive() { # alive PIDFILE NAME: the pid in the file runs, is no zombie and is that program (Debian: slurmd-wlm)
  local p; p=$(cat "$1" 2>/dev/null) || return 1
  [ -n "$p" ] && awk -v n="$2" '/^Name:/{ok = index($2, n) == 1} /^State:/{ok = ok && $2 != "Z"} END{exit !ok}' \
    "/proc/$p/status" 2>/dev/null
}

mkdir -p "$home"/{etc,run,log,state,spool}
chmod 0755 "$home" "$home"/*

if [ "$netns" = 1 ]; then
  ctl=$net.1; node_addr() { echo "$net.$((10 + $1))"; }; node_port() { echo $((port + 10)); }; node_host() { echo "n$1"; }
  # nsenter, not 'ip netns exec', which hides /sys/fs/cgroup, without which slurmd does not start
  run_on() { local n=$1; shift; nsenter --net="/run/netns/$br-$n" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$n" "$@"; }
  echo "$br" > "$home/run/bridge" # slurm-down.sh takes it away
  ip link show "$br" >/dev/null 2>&1 || { ip link add "$br" type bridge; ip addr add "$net.1/24" dev "$br"; ip link set "$br" up; }
  for i in $(seq 0 $((nodes - 1))); do
    ip -n "$br-n$i" link show eth0 >/dev/null 2>&1 && continue
    # left over where a process outlived its namespace's name, or an earlier call was interrupted
    ip link del "$br.n$i" 2>/dev/null || true
    [ -e "/run/netns/$br-n$i" ] || ip netns add "$br-n$i"
    ip link add "$br.n$i" type veth peer name eth0 netns "$br-n$i"
    ip link set "$br.n$i" master "$br" up
    ip -n "$br-n$i" addr add "$net.$((10 + i))/24" dev eth0
    ip -n "$br-n$i" link set lo up
    ip -n "$br-n$i" link set eth0 up
    ip -n "$br-n$i" route add default via "$net.1"
  done
else
  ctl=127.0.0.1; node_addr() { echo "127.0.1.$((10 + $1))"; }; node_port() { echo $((port + 10 + $1)); }; node_host() { echo "$host"; }
  run_on() { shift; "$@"; }
fi

if ! alive "$home/run/slurmctld.pid" slurmctld; then
  if [ "$auth" = munge ]; then
    authconf="AuthType=auth/munge
AuthInfo=socket=$home/run/munge.socket
CredType=cred/munge"
  else
    authconf="AuthType=auth/none
CredType=cred/none"
  fi
  if [ "$acct" = 1 ]; then
    # AccountingStoragePass is the munge socket of the slurmdbd connection when it isn't the system's
    acctconf="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$ctl
AccountingStoragePort=$((port + 4))"
    [ "$auth" = munge ] && acctconf+="
AccountingStoragePass=$home/run/munge.socket"
  else
    acctconf="AccountingStorageType=accounting_storage/none"
  fi
  cat > "$home/etc/slurm.conf" <<CONF
ClusterName=dev
SlurmctldHost=$host($ctl)
SlurmUser=$user
SlurmdUser=$user
$authconf
SlurmctldPort=$port
SlurmctldPidFile=$home/run/slurmctld.pid
SlurmdPidFile=$home/run/slurmd-%n.pid
SlurmctldLogFile=$home/log/slurmctld.log
SlurmdLogFile=$home/log/slurmd-%n.log
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool/%n
SwitchType=switch/none
# PMIx makes a folder of the same name for each step: one place for each node of this host
TmpFS=$home/tmp/%n
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=${SLURM_DEV_TASK:-task/none}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,sched_min_interval=100000,batch_sched_delay=0${SLURM_DEV_SCHED:+,$SLURM_DEV_SCHED}
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PriorityType=priority/basic
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
UnkillableStepTimeout=30
SlurmctldTimeout=30
SlurmdTimeout=15
MessageTimeout=20
InactiveLimit=0
MinJobAge=3600
MaxJobCount=2000
$acctconf
JobCompType=jobcomp/filetxt
JobCompLoc=$home/log/jobcomp.log
PropagateResourceLimits=NONE
CONF
  : > "$home/etc/gres.conf"
  for i in $(seq 0 $((nodes - 1))); do
    echo "NodeName=n$i NodeHostname=$(node_host "$i") NodeAddr=$(node_addr "$i") Port=$(node_port "$i") CPUs=$cpus RealMemory=$mem Gres=gpu:$gpus State=UNKNOWN" >> "$home/etc/slurm.conf"
    # File= must name character devices, or no CUDA_VISIBLE_DEVICES is set; links to /dev/null do, and need no root
    [ "$gpus" -gt 0 ] && echo "NodeName=n$i Name=gpu Count=$gpus File=$home/dev/n$i/gpu[0-$((gpus - 1))]" >> "$home/etc/gres.conf"
    mkdir -p "$home/dev/n$i" "$home/spool/n$i" "$home/tmp/n$i"
    for g in $(seq 0 $((gpus - 1))); do [ -e "$home/dev/n$i/gpu$g" ] || ln -s /dev/null "$home/dev/n$i/gpu$g"; done
  done
  cat >> "$home/etc/slurm.conf" <<CONF
PartitionName=main Nodes=ALL Default=YES MaxTime=24:00:00 DefaultTime=10 State=UP PriorityTier=10 OverSubscribe=NO
PartitionName=low Nodes=ALL MaxTime=24:00:00 DefaultTime=10 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes=ALL MaxTime=24:00:00 DefaultTime=10 State=UP PriorityTier=100 PreemptMode=OFF
CONF
fi

if [ "$auth" = munge ] && ! alive "$home/run/munged.pid" munged; then
  if [ ! -s "$home/etc/munge.key" ]; then
    (umask 077; dd if=/dev/urandom of="$home/etc/munge.key" bs=1024 count=1 status=none)
  fi
  chmod 0700 "$home/etc/munge.key" && chmod 0400 "$home/etc/munge.key"
  munged --key-file="$home/etc/munge.key" --socket="$home/run/munge.socket" --pid-file="$home/run/munged.pid" \
    --log-file="$home/log/munged.log" --seed-file="$home/state/munged.seed" --force
fi
if [ "$acct" = 1 ]; then
  if [ ! -d "$home/db/mysql" ]; then
    mariadb-install-db --no-defaults --user="$user" --datadir="$home/db" --auth-root-authentication-method=normal \
      --skip-test-db > "$home/log/db-install.log" 2>&1
  fi
  if ! alive "$home/run/mariadbd.pid" mariadbd; then
    cat > "$home/etc/init.sql" <<SQL
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED BY 'dev';
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY 'dev';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'localhost';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
SQL
    setsid mariadbd --no-defaults --user="$user" --datadir="$home/db" --bind-address=127.0.0.1 --port=$((port + 5)) \
      --socket="$home/run/mysql.sock" --pid-file="$home/run/mariadbd.pid" --init-file="$home/etc/init.sql" \
      --innodb-buffer-pool-size=32M --innodb-log-file-size=16M --innodb-flush-log-at-trx-commit=0 \
      --performance-schema=OFF --skip-log-bin --max-connections=30 --aria-pagecache-buffer-size=8M \
      --key-buffer-size=8M > "$home/log/mariadbd.log" 2>&1 < /dev/null &
    for _ in $(seq 300); do [ -S "$home/run/mysql.sock" ] && [ -s "$home/run/mariadbd.pid" ] && break; sleep 0.1; done
  fi
  if ! alive "$home/run/slurmdbd.pid" slurmdbd; then
    (umask 077; cat > "$home/etc/slurmdbd.conf" <<CONF
$(if [ "$auth" = munge ]; then echo "AuthType=auth/munge"; echo "AuthInfo=socket=$home/run/munge.socket"; else echo "AuthType=auth/none"; fi)
DbdHost=localhost
DbdAddr=$ctl
DbdPort=$((port + 4))
SlurmUser=$user
LogFile=$home/log/slurmdbd.log
PidFile=$home/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((port + 5))
StorageUser=slurm
StoragePass=dev
StorageLoc=slurm_acct_db
CONF
    )
    slurmdbd
    for _ in $(seq 300); do sacctmgr -n list cluster >/dev/null 2>&1 && break; sleep 0.1; done
  fi
fi
if [ -w /etc/hosts ] && [ "${SLURM_DEV_HOSTS:-1}" = 1 ]; then
  for i in $(seq 0 $((nodes - 1))); do
    grep -qE "[[:space:]]n$i([[:space:]]|\$)" /etc/hosts || echo "$(node_addr "$i") n$i # slurm-dev $home" >> /etc/hosts
  done
fi
alive "$home/run/slurmctld.pid" slurmctld || slurmctld -f "$SLURM_CONF"
for i in $(seq 0 $((nodes - 1))); do
  alive "$home/run/slurmd-n$i.pid" slurmd || run_on "n$i" slurmd -f "$SLURM_CONF" -N "n$i"
done

for _ in $(seq 300); do
  up=$(sinfo -h -N -o '%N %T' 2>/dev/null | sort -u | grep -cE ' (idle|mixed|allocated|completing)$' || true)
  [ "$up" = "$nodes" ] && { print_env; exit 0; }
  # a node that went down for good once is not put back by itself
  sinfo -h -N -o '%N %T' 2>/dev/null | sort -u | awk '$2 ~ /^(down|drain)/{sub(/\*$/,"",$2); print $1}' |
    while read -r n; do scontrol update nodename="$n" state=resume 2>/dev/null || true; done
  sleep 0.1
done
echo "slurm-up: not ready after 30 s, see $home/log" >&2
sinfo -N -l >&2 || true
exit 4
