"""A cluster as a batch script for Slurm: the servers in one step, the coordinator in the script itself."""

from __future__ import annotations

import json
import shlex

from fleet.render import RenderedCluster, reject_gpus
from trainer.core.failures import STOPPED, TRY_AGAIN, USER_ERROR
from trainer.core.runtime import TASK_ENVIRONMENT

FIRST_PORT = 2222
# How long before the time limit the coordinator is asked to save.
SAVE_SECONDS = 120

SCRIPT = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --ntasks={ntasks}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{save_seconds}
# psfleet: {counts}. The run settings are below; {shared} must be the same on all nodes.
# Nodes, processors, memory, partition and time are yours to say: sbatch --time=8:00:00 --cpus-per-task=4 THIS
set -euo pipefail

python={python}
shared={shared}
tasks=({tasks})
work="$shared/slurm-$SLURM_JOB_ID"
umask 0027
mkdir -p "$work"
cat >"$work/run.json" <<'SETTINGS'
{settings}
SETTINGS

# Which node each task is on, by its number in the allocation. Each has a port of its own, as several may share a node.
srun --ntasks={ntasks} --label hostname | sort -n | awk '{{print $2}}' >"$work/nodes"
mapfile -t nodes <"$work/nodes"
port=${{PSFLEET_PORT:-{port}}}
declare -A members
for number in "${{!tasks[@]}}"; do
    job=${{tasks[number]%-*}}
    [ "$job" = evaluator ] || members[$job]+="${{members[$job]:+, }}\\"${{nodes[number]}}:$((port + number))\\""
done
cluster=''
for job in "${{!members[@]}}"; do
    cluster+="${{cluster:+, }}\\"$job\\": [${{members[$job]}}]"
done
printf '{{%s}}\\n' "$cluster" >"$work/cluster.json"

export TRAINER_SETTINGS="$work/run.json" {environment} DATA_DIR="$shared/data"
export PSFLEET_TASKS="${{tasks[*]}}" PSFLEET_PYTHON=$python PSFLEET_CLUSTER="$work/cluster.json"
# A task is a number of the step. One that ends ends no other, and is started again where another try may help.
as_task='
    all=($PSFLEET_TASKS)
    task=${{all[SLURM_PROCID]}}
    if [ "$task" = chief-0 ]; then exit 0; fi # it runs beside the step
    trap "kill -TERM \\$pid 2>/dev/null" TERM
    while :; do
        "$PSFLEET_PYTHON" -m trainer --cluster "$PSFLEET_CLUSTER" \\
            --job-name "${{task%-*}}" --task-index "${{task##*-}}" &
        pid=$!
        code=0; wait "$pid" || code=$?
        case $code in 0 | {user_error} | {stopped}) exit "$code" ;; esac
        sleep 1
    done'
srun --ntasks={ntasks} --overlap --kill-on-bad-exit=0 --wait=0 bash -c "$as_task" &
servers=$!
# On the first node, where this script is too: srun would kill it at once when it is asked to end.
"$python" -m trainer --cluster "$work/cluster.json" --job-name chief --task-index 0 &
chief=$!
asked=''
# The time limit comes as USR1. TERM is a cancelled job, or one that Slurm itself queues again, as for a lost node.
trap 'asked=limit; kill -TERM "$chief" 2>/dev/null || true' USR1
trap 'asked=${{asked:-end}}; kill -TERM "$chief" 2>/dev/null || true' TERM
code=0
# A signal that is trapped ends the first wait.
wait "$chief" || code=$?
while kill -0 "$chief" 2>/dev/null; do
    code=0
    wait "$chief" || code=$?
done
kill -TERM "$servers" 2>/dev/null || true
wait "$servers" 2>/dev/null || true
case $asked:$code in :{try_again} | limit:{try_again} | limit:{stopped})
    echo "the coordinator ended with $code: the job is queued again, and goes on from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
esac
exit "$code"
"""


def render(wanted: RenderedCluster, python: str) -> str:
    """Return the batch script, for `sbatch`.

    Raises OperatorMistake for a cluster with GPUs: Slurm gives all tasks of a step the same.
    """
    reject_gpus(wanted, "one step of Slurm", "sbatch --gpus-per-task")
    tasks = wanted.names
    return SCRIPT.format(
        name=wanted.name,
        ntasks=len(tasks),
        save_seconds=SAVE_SECONDS,
        counts=wanted.counts,
        python=shlex.quote(python),
        environment=" ".join(f"{name}={value}" for name, value in TASK_ENVIRONMENT.items()),
        shared=shlex.quote(wanted.settings["shared_dir"]),
        tasks=" ".join(tasks),
        settings=json.dumps(wanted.settings, indent=2),
        port=FIRST_PORT,
        user_error=USER_ERROR,
        stopped=STOPPED,
        try_again=TRY_AGAIN,
    )
