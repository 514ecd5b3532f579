"""After PLAY RECAP: which hosts are right, which are not and why, and a file of those to run again."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader

from ansible import context

runpy.run_path(str(Path(__file__).parents[1] / "kit.py"))

# What filters and actions import, before there are processes: a process of each host's tasks imports nothing again.
import fleet.rollout.roles  # noqa: E402
import fleet.site.filters  # noqa: E402, F401
from fleet import places  # noqa: E402
from fleet.output.tables import render_table  # noqa: E402
from fleet.site.outcome import outcome  # noqa: E402
from fleet.site.schema.problems import name_some  # noqa: E402

DOCUMENTATION = """
name: lost_hosts
type: aggregate
short_description: Name the hosts that were lost on the way, and why
description:
  - A host that fails or can't be reached is left out from there on, and the others go on.
  - This tells at the end in which phase and why, and keeps the hosts in a file for C(--limit @FILE).
"""
CONTROL_MACHINE = "localhost"
LEAVES_OUT = "mark_unreachable"  # ansible/action_plugins, for one that was lost in a play that has to go on
MAX_TEXT = 300


@dataclass(frozen=True)
class Loss:
    phase: str
    why: str


class CallbackModule(CallbackBase):
    """Ansible's entry point."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "lost_hosts"

    def v2_playbook_on_start(self, playbook: Any) -> None:
        for loader, any_name in ((filter_loader, "default"), (test_loader, "defined")):
            loader.get(any_name)  # which loads all
        self.playbook = Path(playbook._file_name).resolve()
        self.plays_left = len(playbook.get_plays())
        self.play_seen: Any = None
        self.phase = ""
        self.began = False  # once a play is about hosts, and not about the control machine and the inventory
        self.losses: dict[str, Loss] = {}
        self.end: Loss | None = None  # what ended the run for every host

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self.phase = play.get_name()
        self.began = self.began or CONTROL_MACHINE not in str(play.hosts)
        if play._uuid != self.play_seen:  # each batch of a play begins it again
            self.plays_left -= 1
            self.play_seen = play._uuid

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        if ignore_errors:
            return
        self._lose(result, "failed", reason_of(result.result))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        if result.task.action == LEAVES_OUT and result.host.get_name() in self.losses:
            return  # it was reported when it was lost
        self._lose(result, "unreachable", reason_of(result.result))

    def _lose(self, result: Any, kind: str, message: str) -> None:
        loss = Loss(self.phase, f"{kind} ({result.task.get_name().rpartition(' : ')[2]}): {message}")
        self.losses[result.host.get_name()] = loss
        if result.task.run_once or result.task.any_errors_fatal:
            self.end = loss

    def v2_playbook_on_stats(self, stats: Any) -> None:
        if not self.began:
            return
        hosts = sorted(set(stats.processed) - {CONTROL_MACHINE})
        lost: dict[str, Loss] = {}
        for host in hosts:
            found = stats.summarize(host)
            if found["failures"] or found["unreachable"]:  # what was rescued is no loss
                lost[host] = self.losses.get(host, Loss("", "see above"))
        if lost and (self.end or self.plays_left):
            # Ansible goes no further where a play has lost all of its hosts.
            last = self.end.phase if self.end else self.phase
            gone = [host for host, loss in lost.items() if loss.phase == last]
            why = "because of what is above"
            if gone and not self.end:
                why = f"since this phase has no other host than {name_some(gone)}: fix that first"
            for host in hosts:
                lost.setdefault(host, Loss(last, f"held up: the run ended here for all, {why}"))
        owed = self._keep(hosts, lost)
        if not lost:
            self._name_the_next_step(hosts)
            return
        together: dict[Loss, list[str]] = {}
        for host, loss in lost.items():
            together.setdefault(loss, []).append(host)
        rows = [(name_some(names), loss.phase, loss.why) for loss, names in together.items()]
        self._display.display(f"\n{len(hosts) - len(lost)} of {len(hosts)} hosts are right; these are not:")
        self._display.display(render_table(("HOST", "PHASE", "WHY"), rows))
        if owed:
            name = owed.relative_to(Path.cwd()) if owed.is_relative_to(Path.cwd()) else owed
            command = "ansible-playbook" if places.site() == places.KIT else "psfleet playbook"
            self._display.display(f"when they are fixed: {command} {self.playbook.name} --limit @{name}")

    def _name_the_next_step(self, hosts: list[str]) -> None:
        # The whole of site.yml alone makes hosts ready to train.
        partial = context.CLIARGS.get("check") or {*context.CLIARGS.get("tags", ["all"])} != {"all"}
        if self.playbook != places.site() / "site.yml" or partial or self.plays_left:
            return
        verb = "fab" if places.site() == places.KIT else "psfleet"
        right = f"{len(hosts)} of {len(hosts)} hosts are right."
        self._display.display(f"\n{right} Next: {verb} start-cluster, or {verb} doctor to look closer")

    def _keep(self, hosts: list[str], lost: dict[str, Loss]) -> Path | None:
        """Write the hosts that are owed a run: those of this one, and of earlier ones that took no part in it."""
        # The parts in ansible/ are not run by themselves; `fab` runs them and names the hosts itself.
        if self.playbook.parent != places.site() or context.CLIARGS.get("check"):
            return None
        file = self.playbook.with_suffix(".retry")
        before = file.read_text().split() if file.exists() else []
        owed = sorted({*lost, *(host for host in before if host not in hosts)})
        if owed:
            file.write_text("".join(f"{host}\n" for host in owed))
            return file
        file.unlink(missing_ok=True)
        return None


def reason_of(result: Any) -> str:
    """Say in one line what a module said, of a loop the first item that went wrong."""
    items = [each for each in result.get("results") or () if each.get("failed") or each.get("unreachable")]
    source = items[0] if items else result
    message = source.get("msg")
    if source.get("module_stderr"):  # the module did not run: Ansible's own message is that it printed no JSON
        message = outcome(source, 1)
    elif message in (None, "", "non-zero return code"):
        message = source.get("stderr") or message or "it gave no message"
    text = " ".join(str(message).removeprefix("Task failed: ").split())
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
