"""psfleet as an installed package: what its wheel holds, and a site's folder that works with it alone."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.package import ROOT, Installed, build_wheel, install_beside_lent_libraries

# Where a folder of the checkout is in the wheel. Others are for those who work on psfleet.
PLACES = {
    "trainer/": "trainer/",
    "fleet/": "fleet/",
    "ansible/collection/": "ansible_collections/psfleet/cluster/playbooks/",
    "ansible/": "psfleet/ansible/",
    "roles/": "psfleet/ansible/roles/",
    "locks/": "psfleet/locks/",
    "docs/": "psfleet/docs/",
    "inventory/": "psfleet/inventory/",
    "site.yml": "psfleet/site.yml",
    "reset.yml": "psfleet/reset.yml",
    "ansible.cfg": "psfleet/ansible.cfg",
    "fabfile.py": "psfleet/fabfile.py",
}
LEFT_OUT = ("inventory/lab/", "inventory/vms/", "ansible/roles")  # the last is a link


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install_beside_lent_libraries(wheel, tmp_path_factory.mktemp("installed") / "env")


@pytest.fixture(scope="module")
def site(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `psfleet init` made."""
    directory = tmp_path_factory.mktemp("sites") / "mine"
    done = installed.run(directory.parent, "psfleet", "init", "mine", "alpha=192.0.2.11", "beta=192.0.2.12", "gamma")
    assert done.returncode == 0, done.stderr
    return directory


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_what_a_control_machine_needs_and_nothing_else(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    expected = set()
    for name in listed.stdout.splitlines():
        start = next((each for each in PLACES if name.startswith(each)), None)
        if start and not name.startswith(LEFT_OUT) and (ROOT / name).exists():
            expected.add(PLACES[start] + name.removeprefix(start))
    assert len(expected) > 400
    assert names(wheel) == expected


def test_control_machine_needs_no_tensorflow(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        needs = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    always = {need for need in needs if "extra ==" not in need}
    assert {need.partition("==")[0] for need in always} >= {"ansible", "fabric"}
    assert not [need for need in always if "tensor" in need or "keras" in need or "grpc" in need]
    assert any(need.startswith("tensorflow==") and "extra == 'trainer'" in need for need in needs)
    control = (ROOT / "locks/control.in").read_text()
    assert {need.partition(";")[0] for need in always if "==" in need} == {"ansible==12.*", "fabric==3.*"}
    assert "ansible==12.*\n" in control
    assert "fabric==3.*\n" in control


def test_installed_code_is_the_packages_own(installed: Installed, tmp_path: Path) -> None:
    script = "import fleet.places as p, trainer; print(p.KIT, p.ROLES, trainer.__file__)"
    done = installed.run(tmp_path, "python", "-c", script)
    assert done.returncode == 0, done.stderr
    assert all(Path(each).is_relative_to(installed.path) for each in done.stdout.split())
    assert str(ROOT) not in done.stdout


def test_help_lists_the_verbs(installed: Installed, tmp_path: Path) -> None:
    done = installed.run(tmp_path, "psfleet", "--help")
    assert done.returncode == 0, done.stderr
    for verb in ("init", "playbook", "validate", "start-cluster", "status", "stop-cluster", "drill"):
        assert f"\n  {verb} " in done.stdout
    pages = Path(done.stdout.rsplit("docs/operations.md: ")[1].strip())
    assert (pages / "operations.md").is_file()


def test_help_whose_reader_ends_has_no_traceback(installed: Installed, tmp_path: Path) -> None:
    script = f"{{ sleep 0.2; {installed.path}/bin/psfleet --help; echo $? >code; }} | true"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stderr, (tmp_path / "code").read_text()) == ("", "0\n")


def test_verbs_and_flags_are_completed(installed: Installed, tmp_path: Path) -> None:
    assert "_complete_psfleet" in installed.run(tmp_path, "psfleet", "--print-completion-script", "bash").stdout
    assert "start-cluster" in installed.run(tmp_path, "psfleet", "--complete", "--", "psfleet ").stdout.split()
    flags = installed.run(tmp_path, "psfleet", "--complete", "--", "psfleet start-cluster --").stdout.split()
    assert {"--run", "--allow-missing"} <= set(flags)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("stauts", "psfleet has no verb 'stauts'. Did you mean status?"),
        ("init new up=1.2.3", "host 'up' has ansible_host: '1.2.3'; expected an address"),
        ("status", "is in no site's folder; expected one with ansible.cfg, fabfile.py, site.yml, here or above"),
        ("playbook site.yml", "is in no site's folder"),
    ],
)
def test_a_mistake_ends_with_2_and_a_sentence(installed: Installed, tmp_path: Path, words: str, message: str) -> None:
    done = installed.run(tmp_path, "psfleet", *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_site_names_no_place_of_the_installation_and_no_version(installed: Installed, site: Path) -> None:
    texts = {path: path.read_bytes() for path in site.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert len(texts) >= 8
    for path, text in texts.items():
        assert str(installed.path).encode() not in text, path
        assert b"site-packages" not in text, path
        assert b"0.1.0" not in text, path


@pytest.mark.parametrize(("program", "below"), [("psfleet", "programs"), ("fab", "")])
def test_inventory_of_a_site_is_right(installed: Installed, site: Path, program: str, below: str) -> None:
    done = installed.run(site / below, program, "validate")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{site}/inventory is right: 3 hosts, 6 tasks\n"


def test_program_of_a_site_is_looked_at(installed: Installed, site: Path) -> None:
    done = installed.run(site, "psfleet", "start-cluster", "--program", "digits:Digts", "--plan")
    assert done.returncode == 2
    assert "digits.py has no Digts. Did you mean Digits?" in done.stderr


def test_playbooks_of_the_package_are_found(installed: Installed, site: Path) -> None:
    checked = installed.run(site, "ansible-playbook", "site.yml", "reset.yml", "--syntax-check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    listed = installed.run(site / "programs", "psfleet", "playbook", "site.yml", "--list-tasks")
    assert listed.returncode == 0, listed.stdout + listed.stderr
    for task in ("Refuse what can't become a cluster", "trainer : Install the unit", "tensorboard : Install the unit"):
        assert task in listed.stdout
    assert (
        "Refuse where nothing is encrypted"
        in installed.run(site, "ansible-playbook", "psfleet.cluster.rotate_keys", "--list-tasks").stdout
    )


def test_a_run_of_site_yml_keeps_its_lost_hosts_in_the_site(installed: Installed, site: Path) -> None:
    (inventory := site / "nowhere.yml").write_text(
        (site / "inventory/hosts.yml").read_text().replace("gamma\n", "192.0.2.13\n")
    )
    extra = {"ansible_ssh_common_args": "-oConnectTimeout=1", "ansible_port": 9, "cluster_shared_dir": "/srv/trainer"}
    extra |= {"cluster_uid": 6006, "release_program": "programs", "trainer_run": {"program": "digits:Digits"}}
    command = ("ansible-playbook", "-i", str(inventory), "site.yml", "--extra-vars", json.dumps(extra))
    done = installed.run(site, *command)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "0 of 3 hosts are right; these are not:" in done.stdout  # the callback of the package
    assert (site / "site.retry").read_text().split() == ["alpha", "beta", "gamma"]
    assert "other starts are not kept away from this run, since alpha can't be asked" in " ".join(done.stderr.split())


def test_nothing_is_written_into_the_package(installed: Installed, site: Path) -> None:
    (kit,) = installed.path.glob("lib/*/site-packages/psfleet")
    assert [path for path in kit.rglob("*") if path.name in (".cache", "site.retry", "releases")] == []
    assert not os.path.lexists(kit / "ansible" / ".ansible")
