"""What is made of a shipment's words, and how one ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jinja2
import pytest
import yaml

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.places import KIT
from fleet.rollout.release import STAGE, SWITCH, Recap, Shipment, build_release, check_deeply, parse_recap, ship
from fleet.site.filters import FILTERS
from fleet.site.schema.lock_files import LOCKS, lock_of
from fleet.verbs.status import show_status
from tests.unit.fake_hosts import UP, FakeHosts, make_inventory, printed


def ansible(
    output: str, code: int = 0, commands: list[list[str]] | None = None
) -> Callable[..., subprocess.Popen[str]]:
    """Make what prints and ends as ansible-playbook would."""

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        if commands is not None:
            commands.append(command)
        program = f"import sys; print({output!r}); sys.exit({code})"
        return subprocess.Popen([sys.executable, "-c", program], **options)

    return popen


@dataclass
class Shown:
    """A display that remembers."""

    shown: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def show(self, text: str) -> None:
        self.shown.append(text)

    def keep(self, text: str) -> None:
        self.kept.append(text)


OUTPUT = """
TASK [release : Unpack the code] ***********************************************
ok: [head]
changed: [store]
TASK [release : Say what is not proven] ****************************************
ok: [head] => {
    "msg": "host 'head': not proven: build_model"
}
TASK [release : Refuse a program, a run or settings that are wrong] ************
fatal: [head]: FAILED! => {"msg": "no such program"}

PLAY RECAP *****
head  : ok=5    changed=0    unreachable=0    failed=1
store : ok=5    changed=2    unreachable=0    failed=0
"""


DEEP_OUTPUT = """
TASK [release : Refuse what is not as it was installed] ************************
ok: [head]
fatal: [store]: FAILED! => {"changed": false, "msg": "release abc123: it holds x.py\\nsix.py is missing"}
{unreachable}
PLAY RECAP *****
head  : ok=4    changed=0    unreachable=0    failed=0
store : ok=3    changed=0    unreachable=0    failed=1
far : ok=0    changed=0    unreachable={gone}    failed=0
"""


GONE = 'fatal: [far]: UNREACHABLE! => {"msg": "no way"}'


def deep_output(gone: bool = False) -> str:
    return DEEP_OUTPUT.replace("{unreachable}", GONE if gone else "").replace("{gone}", str(int(gone)))


def test_a_shipment_is_one_call_that_names_release_and_choice() -> None:
    commands: list[list[str]] = []
    shown = Shown()
    shipment = Shipment(make_inventory(), STAGE, "abc123", {"run": "a"}, without=["far"])
    done = ship(shipment, shown, ansible(OUTPUT, commands=commands))
    assert done.recaps == {"head": Recap(0, 0, 1), "store": Recap(2, 0, 0)}
    assert done.changes == {"Unpack the code": ["store"]}
    (command,) = commands
    assert [word.rpartition("/")[2] for word in command[1:3]] == ["preflight.yml", "release.yml"]
    assert command[3:5] == ["--inventory", "inventory/pretended"]
    assert json.loads(command[6]) == {
        "fab_shipment": {"release": "abc123", "selection": {"run": "a"}, "untried": False}
    }
    assert command[7:] == ["--limit", "all:!far"]
    assert "shipping: Unpack the code" in shown.shown
    refusal = "Refuse a program, a run or settings that are wrong"
    unproven = "host 'head': not proven: build_model"
    assert shown.kept == ["store: Unpack the code", unproven, f"head: {refusal}: failed"]


@pytest.mark.parametrize(
    ("output", "code", "kind"),
    [
        (OUTPUT.replace("Refuse a program, a run or settings that are wrong", "Prove"), 2, ClusterTrouble),
        ("head : ok=0    changed=0    unreachable=1    failed=0", 4, HostsUnreachable),
        ("nothing at all", 1, OperatorMistake),
    ],
)
def test_a_failed_shipment_says_whose_fault_it_is(output: str, code: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"ended with code {code}"):
        ship(Shipment(make_inventory(), STAGE, "abc123", {}), Shown(), ansible(output, code))


def test_a_deep_look_says_by_host_what_is_wrong() -> None:
    commands: list[list[str]] = []
    found = check_deeply(make_inventory(), ["near"], Shown(), ansible(deep_output(), 2, commands))
    assert found == {"store": "release abc123: it holds x.py\nsix.py is missing"}
    (command,) = commands
    assert command[1].endswith("ansible/deep_check.yml")
    assert command[2:] == ["--inventory", "inventory/pretended", "--limit", "all:!near"]


def test_a_deep_look_that_a_host_missed_is_no_all_clear() -> None:
    with pytest.raises(HostsUnreachable, match=r"far is unreachable(.|\n)*store: release abc123: it holds x\.py"):
        check_deeply(make_inventory(), [], Shown(), ansible(deep_output(gone=True), 4))
    with pytest.raises(ClusterTrouble, match="nothing was compared: ansible-playbook ended with code 1"):
        check_deeply(make_inventory(), [], Shown(), ansible("no play", 1))


def test_a_deep_status_says_what_is_wrong_and_on_how_many_hosts_nothing_is(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(**UP)
    hosts.unreachable = {}
    asked: list[list[str]] = []
    found: dict[str, str] = {}
    console.verify_hosts = lambda inventory, without, display: asked.append(list(without)) or found  # type: ignore[func-returns-value]
    cluster = Cluster(hosts.inventory, hosts)
    show_status(cluster, console)
    assert asked == []
    show_status(cluster, console, deep=True)
    assert asked == [[]]
    assert "code and environment on 3 hosts are as they were installed" in printed(console)
    found["store"] = "six.py is missing\nx.py is in no wheel's record"
    with pytest.raises(ClusterTrouble, match=r"^store: six\.py is missing\nstore: x\.py is in no wheel's record$"):
        show_status(cluster, console, deep=True)
    hosts.unreachable = {"far": "no answer"}
    with pytest.raises(HostsUnreachable, match=r"store: six\.py is missing"):
        show_status(cluster, console, deep=True)
    assert asked[-1] == ["far"]


def test_a_key_that_may_not_sign_is_the_operators_mistake() -> None:
    refused = OUTPUT.replace(
        "Refuse a program, a run or settings that are wrong", "Sign the release on the control machine"
    )
    with pytest.raises(OperatorMistake, match=r"^no such program$"):
        ship(
            Shipment(make_inventory(), STAGE, "abc123", {}),
            Shown(),
            ansible(refused.replace("fatal: [head]", "fatal: [head -> localhost]"), 2),
        )


def test_what_is_shipped_is_read_whatever_the_operator_has_ansible_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real ansible-playbook, in an environment that many have for their own playbooks."""
    monkeypatch.setenv("ANSIBLE_STDOUT_CALLBACK", "minimal")
    monkeypatch.setenv("ANSIBLE_CALLBACK_RESULT_FORMAT", "yaml")
    monkeypatch.setenv("ANSIBLE_FORCE_COLOR", "1")
    monkeypatch.setenv("ANSIBLE_VERBOSITY", "2")
    monkeypatch.setenv("LC_ALL", "C")
    task = {"name": "Refuse a program, a run or settings that are wrong", "ansible.builtin.fail": {"msg": "no such"}}
    play = [{"hosts": "localhost", "gather_facts": False, "tasks": [task]}]

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen([command[0], "/dev/stdin"], **options | {"stdin": subprocess.PIPE})
        assert process.stdin is not None
        process.stdin.write(json.dumps(play))
        process.stdin.close()
        return process

    with pytest.raises(OperatorMistake, match=r"^no such$"):
        ship(Shipment(make_inventory(), STAGE, "abc123", {}), Shown(), popen)


def test_what_the_proof_refuses_is_said_alone() -> None:
    with pytest.raises(OperatorMistake) as caught:
        ship(Shipment(make_inventory(), STAGE, "abc123", {}), Shown(), ansible(OUTPUT, 2))
    assert str(caught.value) == "no such program"


def test_a_shipment_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.rollout.release.SILENT_SECONDS", 0.2)
    monkeypatch.setattr("fleet.rollout.release.LOOK_SECONDS", 0.05)
    processes: list[subprocess.Popen[str]] = []

    def popen(_command: list[str], **options: Any) -> subprocess.Popen[str]:
        program = "import time; print('TASK [release : Fetch the wheels once] ***', flush=True); time.sleep(600)"
        processes.append(subprocess.Popen([sys.executable, "-c", program], **options))
        return processes[0]

    with pytest.raises(ClusterTrouble, match=r"nothing was heard .* task 'Fetch the wheels once'|'Ansible starts'"):
        ship(Shipment(make_inventory(), STAGE, "abc123", {}), Shown(), popen)
    assert processes[0].poll() is not None


def test_a_second_ctrl_c_leaves_no_ansible_behind(heeds_ctrl_c: object) -> None:
    class Slow(subprocess.Popen[str]):
        def wait(self, timeout: float | None = None) -> int:
            signal.raise_signal(signal.SIGINT)
            return super().wait(timeout)

    program = "import time; print('TASK [trainer : Write the run settings] ***', flush=True); time.sleep(600)"
    processes: list[subprocess.Popen[str]] = []

    def popen(_command: list[str], **options: Any) -> subprocess.Popen[str]:
        processes.append(Slow([sys.executable, "-c", program], **options))
        return processes[0]

    display = Shown()
    display.show = lambda _: signal.raise_signal(signal.SIGINT)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        ship(Shipment(make_inventory(), SWITCH, "abc123", {}), display, popen)
    assert processes[0].returncode is not None
    assert signal.getsignal(signal.SIGINT) is heeds_ctrl_c


def test_the_planned_release_is_the_roles() -> None:
    """The locks that a release is planned with are those of the role's defaults."""
    defaults = yaml.safe_load((KIT / "roles/release/defaults/main.yml").read_text())
    environment = jinja2.Environment()
    environment.filters |= FILTERS
    for lock in ("locks/cpu", "locks/mine"):
        rendered = environment.from_string(defaults["release_lock_gpu"]).render(release_lock=lock)
        assert rendered == lock_of({"release_lock": lock}, "release_lock_gpu")
    assert [lock_of({}, name) for name in LOCKS] == [defaults["release_lock"], "locks/cuda"]


def test_a_program_that_cannot_be_shipped_is_the_operators_mistake() -> None:
    inventory = make_inventory()
    inventory.variables["head"]["release_program"] = "no/such/place"  # type: ignore[index]
    with pytest.raises(OperatorMistake, match="release_program"):
        build_release(inventory)
    inventory.variables["head"]["release_program"] = "tests/infra/programs"  # type: ignore[index]
    assert re.fullmatch("[0-9a-f]{12}", build_release(inventory))


def test_recap_is_read_from_ansibles_output() -> None:
    output = (
        "ok: [head]\n\nPLAY RECAP *****\n"
        "head                       : ok=5    changed=2    unreachable=0    failed=0    skipped=0    rescued=0\n"
        "worker-1                   : ok=0    changed=0    unreachable=1    failed=0    skipped=0    rescued=0\n"
    )
    assert parse_recap(output) == {"head": Recap(2, 0, 0), "worker-1": Recap(0, 1, 0)}
