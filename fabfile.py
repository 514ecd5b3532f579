"""The operator's verbs. `fab --list` shows them, `fab VERB --help` their flags; docs/operations.md tells the rest."""

from __future__ import annotations

import sys

if not sys.flags.dont_write_bytecode:
    sys.dont_write_bytecode = False  # Invoke forbids it, and each call would compile Ansible and the kit again

# In the order of docs/verbs.md. What one verb alone needs, it imports itself: half of a `fab status` goes into imports.
# isort: off
# ruff: noqa: F401
from fleet.command_line.training import start_cluster, restart_cluster, stop_cluster, sweep
from fleet.command_line.queue import queue, queue_add, queue_move, queue_remove
from fleet.command_line.look import (
    validate,
    status,
    logs,
    tensorboard,
    runs,
    checkpoints,
    report,
    export,
    ways,
    advise,
    gpu_check,
)
from fleet.command_line.drill import drill
from fleet.command_line.hosts import (
    canary,
    drain,
    history,
    hosts,
    ok_to_stop,
    remove_host,
    replace_host,
    rollback,
    undrain,
    update_hosts,
)
from fleet.command_line.runs import backup, bundle, clone_run, delete_run, doctor, prune, render, restore_run
