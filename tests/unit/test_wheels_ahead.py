"""Where the control machine has no wheels, site.yml begins with them before hosts are prepared, and goes on at once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import wheelhouse
import yaml

from fleet.hosts import agent
from tests.waiting import until

ROOT = Path(__file__).parents[2]
MINOR = ".".join(map(str, sys.version_info[:2]))
# Stands for pip: it says that it has begun, and fetches when it may.
PIP = """
import os, sys, time
from pathlib import Path
from types import ModuleType
notes, place = Path(os.environ["NOTES"]), Path(sys.argv[-1])
(notes / "begun").touch()
end = time.monotonic() + 60
while not (notes / "go").exists() and time.monotonic() < end:
    time.sleep(0.01)
(place / "my_tool-1.0-py3-none-any.whl").write_bytes(b"right")
"""


def play(place: Path, *arguments: str, pythons: Sequence[str] = (MINOR,)) -> str:
    """Run the part of the role that begins, for hosts with these Pythons, all of them this machine."""
    (place / f"mine-{MINOR}.txt").write_text(f"my-tool==1.0 --hash=sha256:{hashlib.sha256(b'right').hexdigest()}\n")
    given = {"release_cache": str(place / "cache"), "release_lock": str(place / "mine")}
    begins = {"name": "Begin", "ansible.builtin.import_role": {"name": "release", "tasks_from": "ahead"}, "vars": given}
    fact = {"name": "Say", "ansible.builtin.set_fact": {"ansible_facts": {"python_version": "{{ minor }}"}}}
    whole = {"hosts": "all", "connection": "local", "gather_facts": False, "tasks": [fact, begins]}
    (place / "play.yml").write_text(yaml.safe_dump([whole]))
    settings = {"ANSIBLE_CONFIG": ROOT / "ansible.cfg", "ANSIBLE_ASYNC_DIR": place / "async", "PYTHONPATH": place}
    environment = {**os.environ, "NOTES": str(place), **{name: str(value) for name, value in settings.items()}}
    hosts = "".join(f"host-{number} minor={minor}\n" for number, minor in enumerate(pythons))
    (place / "hosts.ini").write_text(hosts)
    command = ["ansible-playbook", "--inventory", str(place / "hosts.ini"), str(place / "play.yml"), *arguments]
    command += ["--extra-vars", f"ansible_python_interpreter={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_begins_and_does_not_wait_and_who_comes_later_does(tmp_path: Path) -> None:
    (tmp_path / "pip.py").write_text(PIP)
    play(tmp_path)
    until((tmp_path / "begun").exists)
    sets = tmp_path / "cache/wheels"
    assert not list(sets.glob("*/*.whl"))
    (tmp_path / "go").touch()
    with wheelhouse.hold(sets):
        assert [path.read_bytes() for path in sets.glob("*/*.whl")] == [b"right"]


@pytest.mark.parametrize("arguments", [["--check"], []])
def test_nothing_begins_in_check_mode_or_where_there_are_wheels(tmp_path: Path, arguments: list[str]) -> None:
    if not arguments:
        (tmp_path / "cache/wheels" / MINOR).mkdir(parents=True)
    output = play(tmp_path, *arguments)
    assert "Fetch and compile the wheels once" not in re.sub(r"TASK .*\n(?=skipping)", "", output)
    assert not (tmp_path / "async").exists()


def test_a_python_without_a_lock_leaves_the_others_to_begin(tmp_path: Path) -> None:
    """The role itself says of it what to do; the message of a task that nobody waits for is never seen."""
    (tmp_path / "pip.py").write_text(PIP)
    (tmp_path / "go").touch()
    output = play(tmp_path, pythons=["3.99", MINOR])
    assert [*re.findall(r"item=(\S+)\)", output)] == [MINOR]
    until((tmp_path / "begun").exists)


def test_site_yml_begins_before_hosts_are_prepared() -> None:
    output = subprocess.run(
        ["ansible-playbook", "--inventory", "inventory/lab", "site.yml", "--list-tasks"],
        cwd=ROOT, env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    places = [
        output.index(name) for name in ("Look at every machine", "Begin with the wheels", "Make every machine ready")
    ]
    assert places == sorted(places)


def test_the_module_works_alone_on_the_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on different sets: one takes wheels from the other."""
    tried = []

    def work(*_: object) -> None:
        descriptor = os.open(tmp_path / "wheels", os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        tried.append(True)

    (tmp_path / "lock.txt").write_text("")
    (tmp_path / "wheels/set").mkdir(parents=True)
    given = {"lock": str(tmp_path / "lock.txt"), "dest": str(tmp_path / "wheels/set"), "python": MINOR, "site": "/site"}
    monkeypatch.setattr(wheelhouse, "AnsibleModule", agent.AnsibleModule)
    monkeypatch.setattr(wheelhouse, "_make_right", work)
    monkeypatch.setattr(agent.AnsibleModule, "asked", given)
    wheelhouse.main()
    assert tried == [True]


def test_a_wait_that_does_not_end_says_what_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheelhouse, "MAX_WAIT_SECONDS", 0)
    sets = tmp_path / "wheels"
    with (
        wheelhouse.hold(sets),
        pytest.raises(TimeoutError, match=rf"worked on the wheels in {sets} for 0 s.*fuser -v"),
        wheelhouse.hold(sets),
    ):
        pass
