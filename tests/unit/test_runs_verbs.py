"""The verbs for whole runs, on hosts that are pretended and run the trainer's own commands on a folder here."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from invoke import Context

from fleet.actions.console import Console
from fleet.actions.run_work import render_bytes
from fleet.command_line import VerbCall
from fleet.command_line import runs as upkeep
from fleet.errors import HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.verbs import prune as prune_module
from fleet.verbs.backup import back_up
from fleet.verbs.clone_run import clone_run
from fleet.verbs.delete_run import delete_run
from fleet.verbs.prune import prune, wheel_sets
from fleet.verbs.restore_run import restore_run
from tests.unit import fake_hosts
from tests.unit import test_json_output as answers
from tests.unit.test_upkeep import make, train
from trainer.__main__ import main
from trainer.core.settings.config import Config
from trainer.run.directory import RunDirectory, run_directories
from trainer.run.records import write_record


@dataclass
class Hosts(fake_hosts.FakeHosts):
    """Hosts with one shared path, a folder here; fleet/hosts/agent.py finds releases, environments and wheels."""

    settings_file: str = ""
    envs: Mapping[str, list[str]] = field(default_factory=dict)
    releases: str = ""
    spare: Mapping[str, list[str]] = field(default_factory=dict)
    wheels: list[str] = field(default_factory=list)
    worked: list[str] = field(default_factory=list)

    def run(
        self, scripts: Mapping[str, str], timeout: float = 30, data: Mapping[str, bytes] | None = None
    ) -> dict[str, Answer]:
        if not data:
            return super().run(scripts, timeout)
        away = {host: Answer(unreachable=why) for host, why in self.unreachable.items()}
        return {
            host: away.get(host) or Answer(json.dumps(self._agent(host, json.loads(data[host])))) for host in scripts
        }

    def follow(self, scripts: Mapping[str, str], line: Callable[[str, str], None]) -> dict[str, Answer]:
        found = {}
        for host, script in scripts.items():
            if host in self.unreachable:
                found[host] = Answer(unreachable=self.unreachable[host])
                continue
            verb, words = re.findall(r"-m trainer (\S+) --json --settings \S+ (.*)", script)[0]
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):  # as a terminal has them
                code = main([verb, "--json", "--settings", self.settings_file, *shlex.split(words)], {})
            for text in printed.getvalue().splitlines():
                line(host, text)
            self.worked.append(f"{host}: {verb}")
            found[host] = Answer(code=code)
        return found

    def _agent(self, host: str, asked: dict[str, Any]) -> dict[str, Any]:
        steps: dict[str, Any] = {}
        for step in asked.get("steps", ()):
            if step.get("module") == "release_prune":
                steps["prune"] = {"removed": list(self.spare.get(host, []))}
                if not step.get("check"):
                    self.done.append(f"{host}: prune, keep {step['arguments']['keep']}")
            elif step["name"] == "used":
                steps["used"] = {"rc": 0, "stdout": "1000000\n", "stderr": ""}
            elif step["name"] == "releases":
                steps["releases"] = {"rc": 0, "stdout": self.releases, "stderr": ""}
            else:
                steps[step["name"]] = {"rc": 0, "stdout": "", "stderr": ""}
                self.done.append(f"{host}: {shlex.join(step['command'][-3:])}")
        names = {
            path: self.wheels if path.endswith("/wheels") else self.envs.get(host, []) for path in asked.get("list", ())
        }
        return {"steps": steps, "names": names}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "backups").mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    write_record(shared / "selection.json", {"run": "chosen"})
    return Config(program="p:P", run="digits", shared_dir=str(shared))


@pytest.fixture
def hosts(config: Config, tmp_path: Path) -> Hosts:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"program": "p:P", "run": "digits", "shared_dir": config.shared_dir}))
    return Hosts(fake_hosts.make_inventory(), run_status=fake_hosts.status("new", None), settings_file=str(path))


@pytest.fixture
def console() -> Console:
    return Console(io.StringIO(), json_out=io.StringIO(), ask=lambda _: False)


def output(console: Console) -> str:
    assert isinstance(console.out, io.StringIO)
    return console.out.getvalue()


def test_a_run_is_copied_taken_back_and_cloned_and_each_verb_says_the_next(
    config: Config, hosts: Hosts, tmp_path: Path
) -> None:
    train(make(config, "digits"))
    cluster, backups = Cluster(hosts.inventory, hosts), str(tmp_path / "backups")
    for verb, arguments, line in [
        (back_up, ["digits", backups], f"get it back: fab restore-run {backups}/digits@20"),
        (back_up, ["digits", backups], "exists already, and is whole: step 20"),
        (restore_run, [f"{backups}/digits@20", "digits-2"], "go on with it: fab start-cluster --run digits-2"),
        (clone_run, ["digits", "digits-3"], "run digits-3 is a clone of digits: step 20"),
    ]:
        for plan in (True, False):
            console = Console(io.StringIO(), json_out=io.StringIO())
            verb(cluster, console, *arguments, plan)  # type: ignore[operator]
            found = answers.answer_of(console)
            assert found["host"] == "head"
        assert line in output(console)
    assert [each.run for each in run_directories(Path(config.shared_dir))] == ["digits", "digits-2", "digits-3"]


def test_a_plan_says_how_to_do_it_and_does_nothing(
    config: Config, hosts: Hosts, console: Console, tmp_path: Path
) -> None:
    make(config, "digits")
    back_up(Cluster(hosts.inventory, hosts), console, "digits", str(tmp_path / "backups"), plan=True)
    assert f"do it: fab backup digits --to {tmp_path}/backups" in output(console)
    assert os.listdir(tmp_path / "backups") == []  # noqa: PTH208


def test_the_commands_that_a_plan_names_do_the_same(
    config: Config, hosts: Hosts, console: Console, tmp_path: Path
) -> None:
    train(make(config, "digits"))
    cluster, place = Cluster(hosts.inventory, hosts), tmp_path / "my backups"
    place.mkdir()
    back_up(cluster, console, "digits", str(place), plan=True)
    back_up(cluster, console, "digits", str(place))
    restore_run(cluster, console, f"{place}/digits@20", "digits-2", plan=True)
    commands = [shlex.split(each) for each in re.findall(r": (fab .*)", output(console))]
    assert commands == [
        ["fab", "backup", "digits", "--to", str(place)],
        ["fab", "restore-run", f"{place}/digits@20"],
        ["fab", "restore-run", f"{place}/digits@20", "--run", "digits-2"],
    ]


def test_another_host_works_where_the_chiefs_is_away(
    config: Config, hosts: Hosts, console: Console, tmp_path: Path
) -> None:
    make(config, "digits")
    hosts.unreachable = {"head": "no answer"}
    back_up(Cluster(hosts.inventory, hosts), console, "digits", str(tmp_path / "backups"))
    assert hosts.worked == ["store: backup", "store: backup"]
    assert "get it back: bring it to head, then fab restore-run" in output(console)
    hosts.unreachable = dict.fromkeys(hosts.inventory.hosts, "no answer")
    with pytest.raises(HostsUnreachable):
        back_up(Cluster(hosts.inventory, hosts), console, "digits", str(tmp_path / "backups"))


def test_what_the_trainer_calls_an_error_is_the_operators(config: Config, hosts: Hosts, console: Console) -> None:
    cluster = Cluster(hosts.inventory, hosts)
    with pytest.raises(OperatorMistake, match="there is no run digits in"):
        back_up(cluster, console, "digits", "/nowhere")
    for wrong in ("backups", "~/backups"):
        with pytest.raises(OperatorMistake, match="expected a whole path of the chief's host"):
            back_up(cluster, console, "digits", wrong)
    with pytest.raises(OperatorMistake, match=r"--new '../x' can't name a run.* such as --new digits-2"):
        clone_run(cluster, console, "digits", "../x")


def test_a_run_is_deleted_once_the_operator_agrees(config: Config, hosts: Hosts) -> None:
    directory = make(config, "digits")
    cluster = Cluster(hosts.inventory, hosts)
    asked: list[str] = []
    console = Console(io.StringIO(), json_out=io.StringIO(), ask=lambda text: bool(asked.append(text)))
    with pytest.raises(OperatorMistake, match="nothing was removed; agree with --yes"):
        delete_run(cluster, console, "digits")
    assert re.fullmatch(r"Remove run digits for ever \(\d+ files, .*\)\? \[y/N\] ", asked[0])
    assert directory.path.is_dir()
    assert hosts.holds == ["held"]  # no start may select it meanwhile
    for outcome in ("done", "not there"):
        console = Console(io.StringIO(), json_out=io.StringIO())
        delete_run(cluster, console, "digits", yes=True)
        assert answers.answer_of(console)["outcome"] == outcome
    assert "there is no run digits; the runs are none" in output(console)


def test_a_run_that_trains_is_not_deleted_even_with_yes(config: Config, hosts: Hosts, console: Console) -> None:
    train(make(config, "digits"))
    with pytest.raises(OperatorMistake, match="is not removed: it is trained by"):
        delete_run(Cluster(hosts.inventory, hosts), console, "digits", yes=True)


def test_prune_says_what_goes_of_runs_releases_and_wheels_and_how_much_that_frees(config: Config, hosts: Hosts) -> None:
    for number, run in enumerate(["a", "b", "c"]):
        directory = make(config, run)
        for path in (directory.status, directory.state, directory.settings):
            os.utime(path, (number, number))
    hosts.spare = {"head": ["/opt/trainer/releases/old", "/opt/trainer/envs/cpu-3.11-0000"]}
    hosts.envs = {host: ["cpu-3.11-abc123", "cuda-3.11-abc123"] for host in hosts.inventory.hosts}
    hosts.wheels = ["3.11", "3.13", "cuda-3.11"]
    hosts.releases = release("locks/cpu", "locks/cuda")
    cluster = Cluster(hosts.inventory, hosts)
    console = Console(io.StringIO(), json_out=io.StringIO())
    prune(cluster, console, 1, plan=True)
    found = answers.answer_of(console)
    assert found["runs"]["removed"] == ["a", "b"]
    assert found["releases"] == {"removed": ["head:releases/old", "head:envs/cpu-3.11-0000"], "bytes": 1000000}
    assert found["wheels"] == {"removed": ["3.13"], "bytes": 1000000}
    assert (found["outcome"], found["bytes"] > 2000000, hosts.done) == ("planned", True, [])
    console = Console(io.StringIO(), json_out=io.StringIO(), ask=lambda _: True)
    prune(cluster, console, 1)
    wheels = f"{hosts.inventory.shared_dir}/wheels/3.13"
    assert hosts.done == ["head: prune, keep 1", f"head: rm -rf {wheels}"]
    assert [each.run for each in run_directories(Path(config.shared_dir))] == ["c"]
    assert "freed 2.0 MB" in output(console)


@pytest.mark.parametrize("is_drained", [False, True])
def test_prune_does_the_rest_where_a_host_is_away(config: Config, hosts: Hosts, is_drained: bool) -> None:
    for number, run in enumerate(["a", "b"]):
        directory = make(config, run)
        for path in (directory.status, directory.state, directory.settings):
            os.utime(path, (number, number))
    away, other = list(hosts.inventory.hosts)[1:3]
    hosts.spare = {host: ["/opt/trainer/releases/old"] for host in hosts.inventory.hosts}
    hosts.wheels = ["3.11", "3.13"]
    hosts.envs = {host: ["cpu-3.11-abc123"] for host in hosts.inventory.hosts if host != away}
    hosts.releases = release("locks/cpu", "locks/cuda")
    hosts.unreachable = {away: "no route"}
    if is_drained:
        drain = json.dumps({"host": away})
        look = hosts._observe
        hosts._observe = lambda host, *more: f"{look(host, *more)}\n@drains\n{drain}"  # type: ignore[method-assign]
    console = Console(io.StringIO(), json_out=io.StringIO())
    with contextlib.nullcontext() if is_drained else pytest.raises(HostsUnreachable, match=r"fab prune --keep 1$"):
        prune(Cluster(hosts.inventory, hosts), console, 1, yes=True)
    found = answers.answer_of(console)
    assert found["runs"]["removed"] == ["a"]
    assert f"{other}:releases/old" in found["releases"]["removed"]
    assert f"{away}:releases/old" not in found["releases"]["removed"]
    assert found["wheels"]["removed"] == []  # the one that is away may need any of them
    prune(Cluster(hosts.inventory, hosts), Console(io.StringIO()), 1, ["runs"])


def test_prune_asks_and_may_be_for_one_kind(config: Config, hosts: Hosts, console: Console) -> None:
    make(config, "a")
    make(config, "b")
    with pytest.raises(OperatorMistake, match="nothing was removed"):
        prune(Cluster(hosts.inventory, hosts), console, 1, ["runs"])
    with pytest.raises(OperatorMistake, match="expected runs, releases, wheels"):
        prune(Cluster(hosts.inventory, hosts), console, 1, ["checkpoints"])
    assert len(run_directories(Path(config.shared_dir))) == 2
    quiet = Console(io.StringIO())
    prune(Cluster(hosts.inventory, hosts), quiet, 2, ["runs"])
    assert output(quiet) == "runs: nothing to remove\nnothing to remove\n"


def test_prune_removes_no_run_that_nobody_has_agreed_to(config: Config, hosts: Hosts) -> None:
    for number, run in enumerate(["a", "b"]):
        directory = make(config, run)
        for path in (directory.status, directory.state, directory.settings):
            os.utime(path, (number, number))

    def begin(_: str) -> bool:
        make(config, "c")  # as the queue does while the operator thinks
        return True

    prune(Cluster(hosts.inventory, hosts), Console(io.StringIO(), ask=begin), 1, ["runs"])
    assert [each.run for each in run_directories(Path(config.shared_dir))] == ["b", "c"]


def test_prune_says_the_whole_command_and_leaves_a_line_for_each_kind(
    config: Config, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Mapping[str, Any]] = []
    monkeypatch.setattr("fleet.hosts.history.append", lambda cluster, line, settings: lines.append(line))
    hosts.spare = {"head": ["/opt/trainer/releases/old"]}
    console = Console(io.StringIO())
    prune(Cluster(hosts.inventory, hosts), console, 2, ["releases"], plan=True)
    assert output(console).endswith("do it: fab prune --keep 2 --only releases\n")
    assert lines == []
    prune(Cluster(hosts.inventory, hosts), console, 2, ["releases"], yes=True)
    assert [line["outcome"] for line in lines] == ["begun", "done"]
    assert lines[0]["releases"] == ["head:releases/old"]


def test_the_reason_of_each_verb_that_keeps_runs_is_in_the_history(
    config: Config, hosts: Hosts, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Mapping[str, Any]] = []
    monkeypatch.setattr("fleet.hosts.history.append", lambda cluster, line, settings: lines.append(line))
    monkeypatch.setattr(VerbCall, "cluster", lambda self: contextlib.nullcontext(Cluster(hosts.inventory, hosts)))
    monkeypatch.setattr(VerbCall, "console", console)
    make(config, "digits")
    hosts.spare = {"head": ["/opt/trainer/releases/old"]}
    copy = f"{tmp_path}/backups/digits@20"
    for verb, words in {
        upkeep.backup: {"run": "digits", "to": f"{tmp_path}/backups"},
        upkeep.restore_run: {"copy": copy, "run": "digits-2"},
        upkeep.clone_run: {"run": "digits", "new": "digits-3"},
        upkeep.delete_run: {"run": "digits-3", "yes": True},
        upkeep.prune: {"keep": "2", "only": ["releases"], "yes": True},
    }.items():
        verb.body(Context(), **words, reason=f"why {verb.name}")
    assert [(line["verb"], line["outcome"], line.get("reason")) for line in lines] == [
        (verb, outcome, f"why {verb.replace('-', '_')}")
        for verb in ("backup", "restore-run", "clone-run", "delete-run", "prune")
        for outcome in ("begun", "done")
    ]


def release(lock: str, lock_gpu: str | None = None) -> str:
    """Return what a host says of a release, whose environments it names as release_archive does."""
    found = {"id": "abc"}
    for kind, each in (("environments", lock), ("gpu_environments", lock_gpu)):
        if each:
            found[kind] = {"3.11": {"name": f"{Path(each).name}-3.11-abc123", "lock": f"{each}-3.11.txt"}}  # type: ignore[assignment]
    return json.dumps(found) + "\n"


@pytest.mark.parametrize(
    ("said", "sets"),
    [
        (release("locks/cpu", "locks/cuda"), {"3.11", "cuda-3.11"}),
        (release("locks/mine", "locks/gpu"), {"3.11", "cuda-3.11"}),  # whatever the locks are called
        (release("locks/cpu-no-gpu"), {"no-gpu-3.11"}),
        (release("locks/mine-cuda"), {"3.11"}),
        (release("locks/gpu") + release("locks/one", "locks/gpu"), {"3.11", "cuda-3.11"}),
        ("{\n" + release("locks/mine"), {"3.11"}),
        ("", set()),
    ],
)
def test_the_release_says_from_which_wheels_an_environment_is(said: str, sets: set[str]) -> None:
    names = ["cpu", "cuda", "mine", "gpu", "cpu-no-gpu", "mine-cuda"]
    assert wheel_sets([f"{name}-3.11-abc123" for name in names], said) == sets
    assert wheel_sets([], said) == set()


def test_the_releases_of_a_host_are_read(tmp_path: Path) -> None:
    """As the host does, whose files have many lines."""
    for name in ("one", "two"):
        (tmp_path / "releases" / name).mkdir(parents=True)
        (tmp_path / "releases" / name / "release.json").write_text(json.dumps(json.loads(release(name)), indent=2))
    (tmp_path / "releases/half").mkdir()
    script = prune_module._RELEASES.replace(prune_module.ROOT, str(tmp_path))
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert wheel_sets(["one-3.11-abc123"], done.stdout) == {"3.11"}
    assert len(done.stdout.splitlines()) == 2


def test_bytes_are_told_by_powers_of_ten() -> None:
    assert [render_bytes(number) for number in (999, 1500, 2.5e9)] == ["999 bytes", "1.5 kB", "2.5 GB"]  # type: ignore[arg-type]


def test_a_run_appears_nowhere_while_it_is_copied(config: Config) -> None:
    (Path(config.shared_dir) / "runs/.digits.coming").mkdir(parents=True)
    assert run_directories(Path(config.shared_dir)) == []
    assert RunDirectory(config.shared_dir, "digits").path.exists() is False
