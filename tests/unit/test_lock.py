"""One change of the cluster at a time."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import acquire_start_lock as plugin
import pytest
import yaml

import fleet.hosts.lock
from fleet.actions.console import Console
from fleet.actions.exclusive import begin_exclusively, start_unless_stopped
from fleet.errors import OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.lock import STOPPED_SCRIPT, hold_for, note_stop, take_lock, who_is_at_work
from fleet.hosts.removed_hosts import find_removed, note_removal
from fleet.hosts.ssh import Answer
from fleet.places import KIT
from fleet.site.routes import Host
from tests.unit.test_second_day import make_hosts
from tests.waiting import until


class Here:
    """A chief's host that is this machine, with the lock in a directory of the test."""

    root = 'root() { echo "sudo: unable to resolve host head" >&2; "$@"; }'

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.held: list[subprocess.Popen[str]] = []

    def command(self, script: str) -> list[str]:
        for place in ("/run/", "/var/lib/psfleet/"):
            script = script.replace(place, f"{self.directory}/")
        return ["sh", "-c", f"{self.root}\n{script}"]

    def hold(self, host: str, script: str) -> Answer:
        command = self.command(script)
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # one output, as on a terminal
            text=True,
            start_new_session=True,
            # Under nohup nobody would hear it.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        assert process.stdout
        self.held.append(process)
        return Answer(process.stdout.readline().rstrip("\n"))

    def is_holding(self) -> bool:
        return bool(self.held) and all(process.poll() is None for process in self.held)

    def let_go(self) -> None:
        for process in self.held:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGHUP)  # as sshd does
            process.communicate()
        self.held.clear()

    def close(self) -> None:
        self.let_go()

    def run(self, scripts: Mapping[str, str], timeout: float = 30) -> dict[str, Answer]:
        ((host, script),) = scripts.items()
        command = self.command(script)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return {host: Answer(done.stdout, done.stderr, done.returncode)}

    def follow(self, scripts: Mapping[str, str], line: Callable[[str, str], None]) -> dict[str, Answer]:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.hosts.lock, "WAIT_SECONDS", 0)
    monkeypatch.setattr("fleet.site.origin.getuser", lambda: "ann o'neill")


def test_a_second_one_is_told_who_is_at_work(tmp_path: Path) -> None:
    first, second = Here(tmp_path), Here(tmp_path)
    assert take_lock(first, "head", "drill") is None
    message = (
        r"this cluster is taken by a drill of ann o'neill@\S+ \(process \d+\) since \d\d:\d\d:\d\d UTC\. Begin when"
    )
    with pytest.raises(OperatorMistake, match=message):
        take_lock(second, "head", "start")
    first.let_go()
    assert take_lock(second, "head", "start") is None
    second.let_go()


def test_a_plan_learns_who_is_at_work_and_keeps_nobody_away(tmp_path: Path) -> None:
    first, looker = Here(tmp_path), Here(tmp_path)
    assert who_is_at_work(looker, "head") is None
    assert list(tmp_path.iterdir()) == []  # it makes no file of its own
    take_lock(first, "head", "drill")
    assert re.fullmatch(
        r"a drill of ann o'neill@\S+ \(process \d+\) since \d\d:\d\d:\d\d UTC", str(who_is_at_work(looker, "head"))
    )
    first.let_go()
    assert who_is_at_work(looker, "head") is None
    assert take_lock(first, "head", "start") is None
    first.let_go()


def test_a_stop_is_noted_where_another_is_at_work_and_forgotten_by_the_next(tmp_path: Path) -> None:
    first, other, note = Here(tmp_path), Here(tmp_path), tmp_path / "psfleet-stopped"
    take_lock(first, "head", "update-hosts")
    assert re.fullmatch(
        r"an update-hosts of ann o'neill@\S+ \(process \d+\) since \d\d:\d\d:\d\d UTC", str(note_stop(other, "head"))
    )
    assert re.fullmatch(r"a stop-cluster of ann o'neill@\S+ at \d\d:\d\d:\d\d UTC\n", note.read_text())
    assert note.stat().st_mode & 0o444 == 0o444
    assert other.run({"head": STOPPED_SCRIPT})["head"].stdout == f"@stopped\n{note.read_text()}"
    first.let_go()
    assert take_lock(other, "head", "start") is None
    assert not note.exists()
    other.let_go()


@pytest.mark.parametrize(("while_it_is_lost", "rebooted"), [(False, False), (True, False), (True, True)])
def test_what_takes_its_lock_again_finds_a_stop_that_came_meanwhile(
    tmp_path: Path, while_it_is_lost: bool, rebooted: bool
) -> None:
    first, other, note = Here(tmp_path), Here(tmp_path), tmp_path / "psfleet-stopped"
    take_lock(first, "head", "drill")
    if while_it_is_lost:
        first.let_go()
    if rebooted:
        (tmp_path / "psfleet-start").unlink()  # as all in /run
    assert (note_stop(other, "head") is None) is while_it_is_lost
    first.let_go()
    assert take_lock(first, "head", "drill", again=True) is None
    assert note.exists()
    first.let_go()


def test_who_has_just_ended_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.hosts.lock, "WAIT_SECONDS", 60)
    first, second = Here(tmp_path), Here(tmp_path)
    take_lock(first, "head", "start")
    threading.Timer(0.5, first.let_go).start()
    assert take_lock(second, "head", "start") is None
    second.let_go()


def test_who_has_taken_it_this_moment_is_named(tmp_path: Path) -> None:
    path = tmp_path / "psfleet-start"
    holds = f"echo held; sleep 0.5; echo 'a start of bob' >{path}; sleep 3"
    with subprocess.Popen(["flock", path, "sh", "-c", holds], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OperatorMistake, match=r"taken by a start of bob\."):
            take_lock(Here(tmp_path), "head", "drill")


def test_a_host_that_does_not_answer_keeps_nobody_away() -> None:
    class Silent(Here):
        def hold(self, host: str, script: str) -> Answer:
            return Answer(unreachable="no answer in 10 s")

    assert take_lock(Silent(Path()), "head", "start") == "no answer in 10 s"


def test_why_the_lock_can_t_be_taken_is_told(tmp_path: Path) -> None:
    class WithoutSudo(Here):
        root = 'root() { printf "sudo: unable to resolve host head\\nsudo: a password is required\\n" >&2; return 1; }'

    host = WithoutSudo(tmp_path)
    assert take_lock(host, "head", "start") == "sudo: a password is required"
    host.let_go()


def test_the_lock_is_held_as_long_as_the_process_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet.hosts.lock, "SshHosts", lambda hosts: Here(tmp_path))
    playbook = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    what = (playbook.pid, Host("head", "192.0.2.10"), "run of site.yml")
    holding = threading.Thread(target=hold_for, args=what, daemon=True)
    holding.start()
    other, lock = Here(tmp_path), tmp_path / "psfleet-start"
    for _ in range(600):
        holding.join(0.1)
        if lock.exists() and lock.read_text():  # who holds it writes a name there, after taking it
            break
    with pytest.raises(OperatorMistake, match=r"taken by a run of site\.yml of"):
        take_lock(other, "head", "start")
    assert playbook.stdin
    playbook.stdin.close()  # nobody asks for its exit code
    holding.join(60)
    assert not holding.is_alive()
    playbook.wait()
    assert json.loads(capsys.readouterr().out) == {}
    assert take_lock(other, "head", "start") is None
    hold_for(os.getpid(), Host("head", "192.0.2.10"), "run of site.yml")  # it ends by itself where it is refused
    assert "this cluster is taken by a start of" in json.loads(capsys.readouterr().out)["refused"]
    other.let_go()


def test_the_lock_is_taken_again_after_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.hosts.lock, "AGAIN_SECONDS", 0.05)
    host, began = Here(tmp_path), threading.Semaphore(0)
    hold = host.hold

    def count(name: str, script: str) -> Answer:
        answer = hold(name, script)
        began.release()
        return answer

    monkeypatch.setattr(host, "hold", count)
    monkeypatch.setattr(fleet.hosts.lock, "SshHosts", lambda hosts: host)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as playbook:
        holding = threading.Thread(target=hold_for, args=(playbook.pid, Host("head", "192.0.2.10"), "run of site.yml"))
        holding.start()
        assert began.acquire(timeout=60)
        assert note_stop(Here(tmp_path), "head")
        os.killpg(host.held[0].pid, signal.SIGHUP)
        assert began.acquire(timeout=60)
        with pytest.raises(OperatorMistake, match=r"taken by a run of site\.yml of"):
            take_lock(Here(tmp_path), "head", "start")
        assert (tmp_path / "psfleet-stopped").exists()
    holding.join(60)
    assert not holding.is_alive()


def test_site_yml_ends_where_another_has_taken_its_lost_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.hosts.lock, "AGAIN_SECONDS", 0.05)
    host, other, over = Here(tmp_path), Here(tmp_path), tmp_path / "over"
    waits = {"ansible.builtin.shell": f"touch {tmp_path}/begun; until [ -e {over} ]; do sleep 0.1; done"}
    tasks = [waits, {"ansible.builtin.file": {"path": str(tmp_path / "next"), "state": "touch"}}]
    (tmp_path / "site.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    here = ["--inventory", "localhost,", "--connection", "local", "-e", f"ansible_python_interpreter={sys.executable}"]
    command = ["ansible-playbook", *here, tmp_path / "site.yml"]
    with subprocess.Popen(command, cwd=KIT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as playbook:
        until((tmp_path / "begun").exists, "the first task", 60)
        let_go = host.let_go

        def lose() -> None:
            let_go()
            if not other.held:
                take_lock(other, "head", "drain")

        monkeypatch.setattr(fleet.hosts.lock, "SshHosts", lambda hosts: host)
        monkeypatch.setattr(host, "is_holding", lambda: False)
        monkeypatch.setattr(host, "let_go", lose)
        try:
            hold_for(playbook.pid, Host("head", "192.0.2.10"), "run of site.yml")
            playbook.wait(60)
        finally:
            over.touch()
        _, errors = playbook.communicate()
    assert playbook.returncode == 99, errors  # as after Ctrl-C
    assert not (tmp_path / "next").exists()
    message = r"the connection to head that kept others away was lost, and now this cluster is taken by a drain of ann"
    assert re.search(message, errors)
    other.let_go()


def test_a_verb_takes_its_lost_lock_again_before_it_starts_tasks(tmp_path: Path) -> None:
    first, other, note = Here(tmp_path), Here(tmp_path), tmp_path / "psfleet-stopped"
    day = make_hosts()
    verb, console = Cluster(day.inventory, first), Console(out=io.StringIO())
    begin_exclusively(verb, console, "update-hosts", plan_only=False)
    assert note_stop(other, "head")
    os.killpg(first.held[0].pid, signal.SIGHUP)
    first.held[0].wait()
    begin_exclusively(verb, console, "drain", plan_only=False)  # within the other one
    assert note.exists()
    assert "an update-hosts of" in str(who_is_at_work(other, "head"))
    os.killpg(first.held[0].pid, signal.SIGHUP)
    first.held[0].wait()
    take_lock(other, "head", "start")  # which begins after that stop
    with pytest.raises(OperatorMistake, match="this cluster is taken by a start of"):
        start_unless_stopped(verb, day.inventory.tasks)
    other.let_go()


def test_a_lost_connection_that_still_has_the_lock_is_no_other_one(tmp_path: Path) -> None:
    first, again = Here(tmp_path), Here(tmp_path)
    take_lock(first, "head", "drill")
    assert take_lock(again, "head", "drill", again=True) == "the connection that was lost has not ended there yet"
    with pytest.raises(OperatorMistake, match="taken by a drill of"):
        take_lock(again, "head", "update-hosts", again=True)
    with pytest.raises(OperatorMistake, match=rf"taken by a drill of .* \(process {os.getpid()}\) since"):
        take_lock(again, "head", "drill", again=True, process=4711)  # typed a second time by the same person
    first.let_go()
    assert take_lock(again, "head", "drill", again=True) is None
    again.let_go()


def test_site_yml_refuses_hosts_that_another_checkout_has_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Here(tmp_path)
    waited: list[int] = []
    monkeypatch.setattr(fleet.hosts.lock, "SshHosts", lambda hosts: here)
    monkeypatch.setattr(fleet.hosts.lock, "_is_there", waited.append)  # and it has ended
    everyone = ["head", "worker-0", "worker-1"]

    def said(*back: str) -> str:
        hold_for(7, Host("head", "192.0.2.10"), "run of site.yml", everyone, back)
        answer: dict[str, str] = json.loads(capsys.readouterr().out)
        return answer.get("refused", "")

    assert (said(), waited) == ("", [7])
    for name in ("worker-0", "worker-1", "worker-2"):
        note_removal(here, "head", name)
    refusal = said()
    assert (waited, here.held) == ([7], [])  # it lets go by itself
    assert re.search(
        r"worker-1 was taken out of this cluster by ann o'neill@\S+ at \d{4}-\d\d-\d\d \d\d:\d\d UTC", refusal
    )
    assert "worker-2" not in refusal
    assert refusal.endswith("site.yml -e cluster_brings_back=worker-0,worker-1")
    assert "worker-1" not in said("worker-1")
    assert said("worker-0", "") == ""
    assert said() == ""  # they are back


def test_site_yml_with_check_refuses_the_same_and_takes_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, other = Here(tmp_path), Here(tmp_path)
    monkeypatch.setattr(fleet.hosts.lock, "SshHosts", lambda hosts: here)

    def said(*back: str) -> dict[str, str]:
        head = Host("head", "192.0.2.10")
        hold_for(os.getpid(), head, "run of site.yml", ["head", "worker-1"], back, plan=True)
        answer: dict[str, str] = json.loads(capsys.readouterr().out)
        return answer

    assert said() == {}
    assert list(tmp_path.iterdir()) == []
    take_lock(other, "head", "drill")
    assert "taken by a drill of" in said()["busy"]
    other.let_go()
    note_removal(here, "head", "worker-1")
    assert "worker-1 was taken out of this cluster" in said()["refused"]
    assert said("worker-1") == {}
    assert "refused" in said()  # it has brought nobody back


def test_a_removal_that_the_chiefs_host_has_no_room_to_keep_is_said(tmp_path: Path) -> None:
    (tmp_path / "removed").mkdir()
    for name in ("worker-0", "worker-1"):
        (tmp_path / "removed" / name).symlink_to("/dev/full")
        said = note_removal(Here(tmp_path), "head", name)
        assert said.startswith(f"head does not keep that {name} was taken out (")
        assert f"Take {name} out of the inventories of other checkouts too" in said
    assert note_removal(Here(tmp_path), "head", "worker-2") == ""


def test_hosts_that_were_taken_out_are_found_where_root_alone_may_look(tmp_path: Path) -> None:
    here = Here(tmp_path)
    here.root = f'root() {{ mv {tmp_path}/shut {tmp_path}/removed; "$@"; mv {tmp_path}/removed {tmp_path}/shut; }}'
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut/worker-0").write_text("ann at noon\n")
    (tmp_path / "shut/ps-0").touch()  # by a full disk, which the operator was shown
    assert find_removed(here, "head", ["head", "ps-0", "worker-0"]) == {"worker-0": "ann at noon"}


def test_site_yml_names_its_hosts_to_the_lock_and_reset_yml_none() -> None:
    assert yaml.safe_load((KIT / "site.yml").read_text())[1]["vars"] == {"lock_listed": "{{ groups['all'] }}"}
    [task] = yaml.safe_load((KIT / "ansible/lock.yml").read_text())[0]["tasks"]
    assert task["acquire_start_lock"]["listed"] == "{{ lock_listed | default([]) }}"
    assert "when" not in task  # with --check, too
    assert [
        play for play in yaml.safe_load((KIT / "ansible/reset.yml").read_text()) if "lock_listed" in str(play)
    ] == []


def action(**arguments: Any) -> Any:
    made = object.__new__(plugin.ActionModule)
    made._task = SimpleNamespace(args=arguments)
    return made


def test_a_machine_that_is_the_whole_cluster_needs_no_ssh() -> None:
    variables = {"groups": {"chief": ["head"]}, "hostvars": {"head": {"ansible_connection": "local"}}}
    done = action().run(task_vars=variables)
    assert (done["skipped"], "warnings" in done, "failed" in done) == (True, False, False)


def test_the_command_line_of_ansible_leads_to_the_chief_s_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (key := tmp_path / "key").touch()
    options = {"remote_user": "ann", "private_key_file": str(key), "ssh_common_args": "-o StrictHostKeyChecking=no"}
    monkeypatch.setattr(plugin, "CLIARGS", options)
    host = plugin.host_of("head", {"ansible_host": "192.0.2.10"})
    assert (host.address, host.user, host.key_file) == ("192.0.2.10", "ann", key)
    assert host.ssh_options == {"stricthostkeychecking": "no"}
    assert plugin.host_of("head", {"ansible_user": "ben"}).user == "ben"  # a variable wins, as it does for Ansible


def test_a_holder_that_can_t_begin_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin.places, "CODE", tmp_path)  # where there is no fleet
    monkeypatch.delenv("PYTHONPATH", raising=False)
    variables = {"groups": {"chief": ["head"]}, "hostvars": {"head": {"ansible_host": "192.0.2.10"}}}
    [warning] = action().run(task_vars=variables)["warnings"]
    assert "since head can't be asked: " in warning
    assert "No module named" in warning


@pytest.mark.parametrize("playbook", ["site.yml", "/opt/psfleet/ansible/reset.yml"])
def test_the_lock_names_the_playbook_that_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, playbook: str
) -> None:
    holder = tmp_path / "fleet/hosts/lock.py"
    holder.parent.mkdir(parents=True)
    holder.write_text(
        "import json, sys\nasked = json.load(sys.stdin)\n"
        "words = [asked['what'], *asked['listed'], *asked['back'], str(asked['plan'])]\n"
        "print(json.dumps({'refused': ' '.join(words)}))\n"
    )
    monkeypatch.setattr(plugin.places, "CODE", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(plugin, "CLIARGS", {"args": (playbook,)})
    variables = {"groups": {"chief": ["head"]}, "hostvars": {"head": {"ansible_host": "192.0.2.10"}}}
    for check in (False, True):
        asked = action(listed=["head", "worker-0"], back=["worker-0"])
        done = asked.run(task_vars={**variables, "ansible_check_mode": check})
        assert done == {"failed": True, "msg": f"run of {playbook.rpartition('/')[2]} head worker-0 worker-0 {check}"}


@pytest.mark.parametrize("arguments", [(), ("--limit", "worker"), ("--check",)])
def test_site_yml_goes_on_where_the_chief_s_host_can_t_be_asked(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    gone = {"ansible_host": "127.0.0.1", "ansible_port": 1}  # nothing listens there
    groups = {"chief": {"hosts": {"head": gone}}, "worker": {"hosts": {"worker": gone}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(groups))
    command = ["ansible-playbook", "--inventory", tmp_path / "hosts.yml", KIT / "ansible/lock.yml", *arguments]
    done = subprocess.run(command, cwd=KIT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    warning = re.search(r"other starts are not kept away from this run, since head can't be\s+asked", done.stderr)
    assert bool(warning) is ("--check" not in arguments), done.stderr
