"""The shell scripts that hosts run for `fab`: stop, park, remember, put back, and the like."""

from __future__ import annotations

from fleet.hosts.drain_records import LEAVING
from fleet.hosts.run import AS_TRAINER, SETTINGS
from fleet.site.cluster_note import NOTE

CURRENT, PREVIOUS, RELEASES = "/opt/trainer/current", "/opt/trainer/previous", "/opt/trainer/releases"

# As each start of a task does: where none ran, a stale handle has not been seen. Hosts with a mount of ours only.
REMOUNT = "if systemctl cat psfleet-remount >/dev/null 2>&1; then root systemctl start psfleet-remount; fi"
TRAINER = f"cd {CURRENT} && {AS_TRAINER} env/bin/python -m trainer {{verb}} --json --settings {SETTINGS}"

STATUS = (
    f"if [ -e {CURRENT} ]; then echo '@run'; {TRAINER.format(verb='status')}\n"
    "code=$?; echo; echo '@run-code'; echo $code; fi"
)

# What a planned reboot has stopped, whom the coordinator lets go of (roles/trainer/tasks/leave.yml), and what begins
# parked. A stop by hand replaces all of them. A start leaves alone which tasks leave that are not among its own.
PARKED = "/run/psfleet-parked"
_STOPPED = "/opt/trainer/drained"
FORGET_STARTED = f'rm -rf {_STOPPED} {PARKED}; if cd {LEAVING} 2>/dev/null; then rm -f "$@"; fi'
_FORGET = f"rm -rf {_STOPPED} {LEAVING} {PARKED}"
DISABLE = f'{_FORGET}; systemctl reset-failed "$@" 2>/dev/null; systemctl disable --quiet "$@"'
BEFORE = "/opt/trainer/before"
_WANTED = "etc/systemd/system/multi-user.target.wants/trainer@*.service"
# What differs from task to task, and which secrets it loads; in etc/trainer they lie themselves.
_DROP_INS = " ".join(f"etc/systemd/system/trainer@*.service.d/psfleet-{name}.conf" for name in ("task", "secrets"))
# Who may come in to the tasks, and whom they speak with: all that roles/firewall writes.
_TABLE = "var/lib/psfleet/firewall.nft"
_FIREWALL_FILES = (
    f"{_TABLE} etc/psfleet/firewall.nft usr/local/sbin/psfleet-firewall etc/systemd/system/*.service.d/firewall.conf "
    "etc/systemd/system/nftables.service.d/psfleet.conf etc/systemd/system/psfleet-firewall.service "
    "etc/systemd/system/sysinit.target.wants/psfleet-firewall.service"
)
# All that a start may change beside the release, but for what only its proof reads.
DIGEST = (
    f"cd /\nfind etc/trainer etc/systemd/system/trainer@.service {_DROP_INS} {_FIREWALL_FILES} "
    "-path etc/trainer/secrets-coming -prune -o -type f -exec sha256sum {} + 2>/dev/null | sort | sha256sum"
)
SAVE_STATE = f"""set -e
umask 077
rm -rf {BEFORE}.new
mkdir -p {BEFORE}.new
cd /
ls -d {CURRENT[1:]} {PREVIOUS[1:]} etc/trainer etc/systemd/system/trainer@.service {_WANTED} {_DROP_INS} \\
  {_FIREWALL_FILES} \\
  >{BEFORE}.new/names 2>/dev/null || true
tar -cf {BEFORE}.new/files.tar -T {BEFORE}.new/names
systemctl list-units --plain --no-legend --state=active,activating,reloading "trainer@*.service" |
  cut -d" " -f1 | while read -r unit; do [ -e "{PARKED}/$unit" ] || echo "$unit"; done >{BEFORE}.new/running
chmod go+rx {BEFORE}.new
chmod go+r {BEFORE}.new/running  # the archive has secrets
rm -rf {BEFORE}
mv {BEFORE}.new {BEFORE}
"""
RESTORE_STATE = f"""set -e
tar -tf {BEFORE}/files.tar >/dev/null
systemctl stop "trainer@*.service"
rm -rf {PARKED}
systemctl reset-failed "trainer@*.service" 2>/dev/null || true
cd /
rm -rf etc/trainer {_WANTED} {_DROP_INS} {_FIREWALL_FILES} run/psfleet-firewall/tried.nft
tar -xf {BEFORE}/files.tar
systemctl daemon-reload
if [ -e {_TABLE} ]; then
  systemctl restart psfleet-firewall.service
elif nft list table inet psfleet >/dev/null 2>&1; then
  systemctl stop psfleet-firewall.service 2>/dev/null || true
  nft delete table inet psfleet
  rm -rf run/psfleet-firewall
fi
"""


_SHOW = 'show() { systemctl show --value --property="$1" "$unit"; }; '
# A supervisor that heeds SIGHUP (bit 0 of SigCgt) ends its child and keeps what it has imported. One that is not up
# yet, or is of an older kit, is stopped; so is one that ended meanwhile, or whose child did not end in five minutes.
PARK = (
    _SHOW
    + f"parked={PARKED}; "
    + """waits= cold= until=$(($(date +%s) + 300))
for unit; do
  main=$(show MainPID)
  if [ -e "$parked/$unit" ]; then continue
  elif [ "$(show ActiveState)" = active ] && grep -qs "^SigCgt:.*[13579bdf]$" "/proc/$main/status" && kill -HUP "$main"
  then waits="$waits $unit=$main"
  else cold="$cold $unit"
  fi
done
[ -z "$cold" ] || systemctl stop $cold || exit
cold=
for each in $waits; do
  unit=${each%=*} main=${each##*=}
  while :; do
    case $(show StatusText) in parked*) break ;; esac
    if [ "$(show MainPID)" != "$main" ] || [ "$(date +%s)" -gt "$until" ]; then cold="$cold $unit" && break; fi
    sleep 0.05
  done
done
[ -z "$cold" ] || systemctl stop $cold"""
)
# One at a time: a file that goes between its making and the start of its unit would have that train at once.
_IN_TURN = "exec 9>/run/psfleet-agent; flock -w 20 9; " + _SHOW


# Which tasks of which start are cooled: its look may be late, and reach the host only afterwards.
COOLED = "/run/psfleet-cooled"


def _warm(states: str) -> str:
    return (
        _IN_TURN
        + f"""umask 022
start=$1
shift
mkdir -p {PARKED}
for unit; do
  [ ! -e "{COOLED}/$start.$unit" ] || continue
  case $(show ActiveState) in {states})
    touch "{PARKED}/$unit"
    systemctl start --no-block "$unit" && echo "$unit"
  esac
done"""
    )


# Supervisors of tasks that don't run: they import TensorFlow and wait, until `start` takes the files away.
WARM = _warm("inactive | failed")
WARM_EARLY = _warm("inactive")  # before a start may still be refused: why a unit has failed stays to be seen
# Those that never went on. The files go last: a supervisor that finds none trains at once.
COOL = (
    _IN_TURN
    + f"""start=$1
shift
mkdir -p {COOLED}
find {COOLED} -type f -mmin +15 -delete
for unit; do : >"{COOLED}/$start.$unit"; done
cd {PARKED} 2>/dev/null || exit 0
cold= files=
for unit; do
  [ -e "$unit" ] || continue
  files="$files $unit"
  case "$(show ActiveState) $(show StatusText)" in
    "active parked"*) cold="$cold $unit" ;;
    active* | reloading*) ;;
    *) cold="$cold $unit" ;;
  esac
done
[ -z "$cold" ] || systemctl stop $cold && rm -f $files"""
)
GO_ON = (
    _SHOW
    # Also one whose child has still to end: bit 9 of SigCgt says that it heeds SIGUSR1.
    + 'for unit; do main=$(show MainPID); grep -qs "^SigCgt:.*[2367abef]..$" "/proc/$main/status" && '
    + 'kill -USR1 "$main" 2>/dev/null; done; true'
)

# Of each main process: what works is the child that it has forked.
DIRECTORIES = (
    "for pid; do read child rest 2>/dev/null </proc/$pid/task/$pid/children; "
    'echo "$pid $(readlink /proc/${child:-$pid}/cwd)"; child=; done'
)

# The tasks and TensorBoard, their files and what they run on. Users, mounts, drivers and the packet filter stay: the
# host stays shut. It belongs to no cluster any more.
CLEAN = f"""set -e
units=$(systemctl list-units --all --plain --no-legend 'trainer@*.service' | cut -d' ' -f1)
[ -z "$units" ] || systemctl stop $units
[ ! -e /etc/systemd/system/tensorboard.service ] || systemctl disable --now --quiet tensorboard.service
rm -f /etc/systemd/system/tensorboard.service /etc/systemd/system/multi-user.target.wants/trainer@*.service
rm -rf /etc/systemd/system/trainer@.service /etc/systemd/system/trainer@*.service.d /etc/trainer
systemctl daemon-reload
systemctl reset-failed 'trainer@*.service' 2>/dev/null || true
rm -rf /opt/trainer {NOTE}"""
