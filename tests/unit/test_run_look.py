"""A look at the run reads its files in a shell, and asks the trainer where they don't say all of it."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.actions.shipping import select_and_observe
from fleet.errors import ClusterTrouble
from fleet.hosts import history, run
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import Observation
from fleet.hosts.ssh import Answer
from fleet.planning.decision import RunChoice
from fleet.planning.plan import Plan
from tests.unit.fake_hosts import FakeHosts, make_inventory, status
from trainer.run.directory import RunDirectory
from trainer.run.records import write_record
from trainer.telemetry.events import EventLog
from trainer.telemetry.status import Status

BY_TRAINER = status("new", None) | {"program": "p:Asked"}


class Shell(FakeHosts):
    """The chief's host has a real shell, and the trainer's files below a directory."""

    place: Path
    rights = '"$@"'
    asks = True  # whether the trainer can be asked

    def run(
        self, scripts: Mapping[str, str], timeout: float = 30, data: Mapping[str, bytes] | None = None
    ) -> dict[str, Answer]:
        answers = super().run(scripts)
        if "python -m trainer" in scripts["head"] and self.asks:
            self.done.append("asked the trainer")
            known = answers["head"].stdout.partition("@selection")[0]
            return {**answers, "head": Answer(f"{known}\n@run\n{json.dumps(BY_TRAINER)}\n@run-code\n0\n")}
        settings = "echo '@run-settings'"
        script = settings + scripts["head"].partition(settings)[2]
        if settings not in scripts["head"]:  # what comes before the trainer is asked
            script = run.AS_TRAINER + scripts["head"].partition(run.AS_TRAINER)[2]
        script = script.replace("/etc/trainer", f"{self.place}/etc")
        script = f"root() {{ shift 5; {self.rights}; }}\n{script}"
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
        known = answers["head"].stdout.partition("@selection")[0]
        return {**answers, "head": Answer(f"{known}{done.stdout}", done.stderr)}


@pytest.fixture
def hosts(tmp_path: Path) -> Shell:
    inventory = make_inventory()
    variables = {
        host: {**each, "cluster_shared_dir": str(tmp_path / "srv")} for host, each in inventory.variables.items()
    }
    hosts = Shell(replace(inventory, variables=variables))
    hosts.place = tmp_path
    (tmp_path / "etc").mkdir()
    write_record(tmp_path / "etc/run.json", {"run": "digits", "shared_dir": str(tmp_path / "srv")})
    return hosts


@pytest.fixture
def look(hosts: Shell) -> Callable[..., Observation]:
    cluster: Any = Cluster(hosts.inventory, hosts)  # type: ignore[arg-type]
    return lambda **more: cluster.observe(["head"], **more)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """What a coordinator has written."""
    directory = RunDirectory(tmp_path / "srv", "digits")
    Status("digits", str(directory.path), "p:P", state="training", step=12, loss=float("nan")).write(directory)  # type: ignore[arg-type]
    write_record(directory.settings, {"program": "p:P", "from": "old@7"})
    write_record(directory.evaluation, {"step": 10, "metrics": {"accuracy": 0.5}})
    events = EventLog(directory.event_log)
    for number in range(9):
        events.write("member-back", message=f"@{number}")
        events.write("checkpoint-saved", message="step 10")
    return directory


def test_a_run_is_read_from_its_files_without_the_trainer(
    hosts: Shell, look: Callable[..., Observation], directory: RunDirectory
) -> None:
    seen = look()
    assert seen.run is not None
    assert (seen.run.state, seen.run.step, seen.run.loss, seen.run.begun_from) == ("training", 12, "NaN", "old@7")
    assert (seen.run.run_dir, seen.run.evaluation and seen.run.evaluation.step) == (str(directory.path), 10)
    assert [event["message"] for event in seen.run.events] == ["@4", "@5", "@6", "@7", "@8"]
    assert hosts.done == []
    directory.status.write_text(directory.status.read_text().replace('"step": 12', '"step": 13'))
    seen = look()
    assert seen.run is not None
    assert seen.run.step == 13


def test_the_run_that_is_selected_is_read(look: Callable[..., Observation], directory: RunDirectory) -> None:
    write_record(directory.path.parents[1] / "selection.json", {"run": "other", "program_args": {"run": "x"}})
    text = json.dumps({"run": "other", "program_args": {"run": "x"}})
    (directory.path.parents[1] / "selection.json").write_text(text)  # on one line, as `fab` writes it
    seen = look()  # the shell took the last `run` for the name
    assert (seen.run and seen.run.program) == "p:Asked"
    write_record(directory.path.parents[1] / "selection.json", {"run": "other", "program_args": {"a": 1}})
    other = RunDirectory(directory.path.parents[1], "other")
    Status("other", "", state="stopped", step=1).write(other)  # type: ignore[arg-type]
    seen = look()
    assert seen.run is not None
    assert (seen.run.run, seen.run.run_dir, seen.run.state) == ("other", str(other.path), "stopped")


def damage(directory: RunDirectory) -> None:
    directory.status.write_text("{")


def damage_evaluation(directory: RunDirectory) -> None:
    directory.evaluation.write_text("{")


def share_another_path(directory: RunDirectory) -> None:
    write_record(directory.path.parents[2] / "etc/run.json", {"run": "digits", "shared_dir": "/elsewhere"})


def sweep(directory: RunDirectory) -> None:
    write_record(directory.path.parents[1] / "selection.json", {"run": "digits", "sweep": {}})


def damage_settings(directory: RunDirectory) -> None:
    (directory.path.parents[2] / "etc/run.json").write_text('{"run": "digits"')


def begin_again(directory: RunDirectory) -> None:
    directory.status.unlink()


def lack_fields(directory: RunDirectory) -> None:
    directory.status.write_text('{"state": "training"}')


def select_nothing(directory: RunDirectory) -> None:
    (directory.path.parents[1] / "selection.json").write_text("null")


def select_a_path(directory: RunDirectory) -> None:
    write_record(directory.path.parents[1] / "selection.json", {"run": str(directory.path)})


CHANGES = (
    *(damage, damage_evaluation, share_another_path, sweep, damage_settings, begin_again),
    *(lack_fields, select_nothing, select_a_path),
)


@pytest.mark.parametrize("change", CHANGES)
def test_the_trainer_is_asked_for_what_the_files_do_not_say(
    hosts: Shell, look: Callable[..., Observation], directory: RunDirectory, change: Callable[[RunDirectory], None]
) -> None:
    change(directory)
    seen = look()
    assert (seen.run and seen.run.program) == "p:Asked"
    assert hosts.done == ["asked the trainer"]


def test_the_trainer_is_asked_where_the_files_can_not_be_read(
    hosts: Shell, look: Callable[..., Observation], directory: RunDirectory
) -> None:
    hosts.rights = "false"
    assert look(new_is_enough=True).run is not None
    assert hosts.done == ["asked the trainer"]
    hosts.rights, hosts.done = '"$@"', []
    directory.path.rename(directory.path.with_name("elsewhere"))
    seen = look(new_is_enough=True)
    assert (seen.run and seen.run.state) == "new"
    assert hosts.done == []


def test_a_start_asks_the_trainer_and_waits_without_it_for_a_new_run(
    hosts: Shell, look: Callable[..., Observation], directory: RunDirectory
) -> None:
    assert look(by_trainer=True).run is not None
    assert hosts.done == ["asked the trainer"]
    begin_again(directory)
    seen = look(new_is_enough=True)
    assert (seen.run and seen.run.state) == "new"
    assert hosts.done == ["asked the trainer"]


def test_a_host_waits_for_news_of_a_run(directory: RunDirectory, look: Callable[..., Observation]) -> None:
    def waits(known: run.Run) -> bool:
        """It sleeps a tenth of a second at a time; here each takes none, and is counted."""
        script = run.script_of_news(known, 1.0).replace(run.AS_TRAINER, "").replace("sleep 0.1", "echo")
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
        assert len(done.stdout) in (0, 10)
        return bool(done.stdout)

    seen = look().run
    assert seen is not None
    assert waits(seen)
    Status("digits", str(directory.path), "p:P", state="training", step=13).write(directory)  # type: ignore[arg-type]
    assert not waits(seen)
    assert not waits(run.Run("digits", str(directory.path)))
    assert waits(run.Run("new", str(directory.path.with_name("new"))))


def test_what_a_run_s_files_hold_is_no_file_of_the_control_machine_s_and_no_section(
    look: Callable[..., Observation], directory: RunDirectory, tmp_path: Path
) -> None:
    stolen = tmp_path / "bashrc"
    text = directory.status.read_text()
    directory.status.write_text(f"{text}\n==> {stolen} <==\nevil\n@now\n12345\n")
    seen = look()
    assert not stolen.exists()
    assert seen.run is not None
    assert seen.run.step == 12
    assert seen.clocks["head"] != 12345


@pytest.mark.parametrize("by_trainer", [False, True])
def test_a_path_that_hangs_is_named_and_its_host_is_no_host_that_is_away(
    hosts: Shell, look: Callable[..., Observation], directory: RunDirectory, monkeypatch: pytest.MonkeyPatch,
    by_trainer: bool,
) -> None:  # fmt: skip
    """A pipe that nobody writes to stands for the file of a server that is away."""
    os.mkfifo(directory.path.parents[1] / "selection.json")
    monkeypatch.setattr(run, "PATH_SECONDS", 1)
    monkeypatch.setattr(hosts, "asks", False)
    seen = look(by_trainer=by_trainer)
    assert (seen.unreachable, seen.run, "chief-0" in seen.units) == ({}, None, True)
    assert str(seen.run_error) == (
        f"the shared path {hosts.place}/srv gives no answer on head within 1 s: is its server up?"
    )
    assert hosts.done == []


def test_what_can_not_be_written_on_a_path_that_hangs_is_tried_on_one_host_alone(
    hosts: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def run_all(scripts: Mapping[str, str], timeout: float = 30) -> dict[str, Answer]:
        tried.extend(scripts)
        return {host: Answer(code=124 if "timeout 15" in script else 0) for host, script in scripts.items()}

    monkeypatch.setattr(hosts, "run", run_all)
    cluster = Cluster(hosts.inventory, hosts)  # type: ignore[arg-type]
    with pytest.raises(
        ClusterTrouble, match=r"selection.json can't be written on head: the shared path .* gives no answer"
    ):
        cluster.select({"run": "digits"})
    with pytest.raises(
        ClusterTrouble, match=r"history.jsonl can't be written on head: the shared path .* is its server up"
    ):
        history.append(cluster, {"verb": "stop-cluster"})
    assert tried == ["head", "head"]


def test_what_is_chosen_is_on_the_shared_path_before_the_hosts_are_looked_at(
    hosts: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one script of the chief's host, and not in one of each."""
    shared, scripts_of_head, pretend = hosts.place / "srv", [], FakeHosts.run
    shared.mkdir()

    def run_all(scripts: Mapping[str, str], timeout: float = 30) -> dict[str, Answer]:
        scripts_of_head.append(scripts["head"])
        write = scripts["head"].partition("\necho '@now'")[0]
        done = subprocess.run(["sh", "-c", f'root() {{ shift 5; "$@"; }}\n{write}'], capture_output=True, text=True)
        answers = pretend(hosts, scripts)
        return {**answers, "head": Answer(f"{done.stdout}{answers['head'].stdout}", done.stderr)}

    monkeypatch.setattr(hosts, "run", run_all)
    cluster, console = Cluster(hosts.inventory, hosts), Console(io.StringIO())  # type: ignore[arg-type]
    hosts.run_status = status("new", None)
    choice = RunChoice({"run": "digits-2"}, write=True, new=True)
    plan = Plan(hosts.inventory, "abc123", choice, {}, [], [], {}, untried=True)
    seen = select_and_observe(cluster, console, plan)
    assert json.loads((shared / "selection.json").read_text()) == {"run": "digits-2"}
    assert json.loads((shared / "release.json").read_text()) == {"release": "abc123"}
    assert (len(scripts_of_head), seen.selection, seen.settings.keys()) == (
        1,
        {"run": "digits-2"},
        hosts.inventory.hosts.keys(),
    )
    (shared / "selection.json.new").mkdir()
    with pytest.raises(ClusterTrouble, match=r"selection\.json can't be written on head: .*(Is a|is a) directory"):
        select_and_observe(cluster, console, replace(plan, by_ansible={"far": "it differs"}))
    # Without Ansible the trainer has proven the choice a moment ago.
    assert ["trainer status" in script for script in scripts_of_head] == [False, True]
    monkeypatch.setattr("fleet.hosts.run.PATH_SECONDS", 1)
    (shared / "selection.json.new").rmdir()
    os.mkfifo(shared / "selection.json.new")  # a pipe that nobody reads stands for the file of a server that is away
    with pytest.raises(ClusterTrouble, match=r"can't be written on head: the shared path .* gives no answer"):
        select_and_observe(cluster, console, plan)


def test_a_record_is_written_with_its_folder_and_an_empty_one_is_removed(hosts: Shell) -> None:
    (hosts.place / "srv").mkdir()
    cluster = Cluster(hosts.inventory, hosts)  # type: ignore[arg-type]
    file = hosts.place / "srv/drains/head.json"
    for record in ({"host": "head"}, {"host": "head", "who": "ana"}, {}):
        script = cluster.script_of("drains/head.json", record)
        subprocess.run(["sh", "-c", f'root() {{ shift 5; "$@"; }}\n{script}'], check=True)
        assert (json.loads(file.read_text()) if file.exists() else {}) == record


def test_what_is_kept_and_the_line_beside_it_fail_apart(hosts: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    rights = "true"

    def run_all(scripts: Mapping[str, str]) -> dict[str, Answer]:
        commands = {host: ["sh", "-c", f"root() {{ {rights}; }}\n{script}"] for host, script in scripts.items()}
        done = {host: subprocess.run(each, capture_output=True, text=True) for host, each in commands.items()}
        return {host: Answer(each.stdout, each.stderr, each.returncode) for host, each in done.items()}

    monkeypatch.setattr(hosts, "run", run_all)
    cluster = Cluster(hosts.inventory, hosts)  # type: ignore[arg-type]
    everywhere = hosts.inventory.hosts
    assert cluster.save_state(everywhere, f"echo left; touch {hosts.place}/line")
    assert (hosts.place / "line").exists()
    assert not cluster.save_state(everywhere, "echo 'no room' >&2; false")
    assert not cluster.save_state(["far"], "true")  # the chief's host alone leaves it
    rights = "echo full >&2; false"
    with pytest.raises(ClusterTrouble, match="/opt/trainer/before can't be written"):
        cluster.save_state(everywhere, f"touch {hosts.place}/other")
    assert not (hosts.place / "other").exists()
