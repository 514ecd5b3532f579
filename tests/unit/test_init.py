"""`psfleet init` makes a site's folder, and takes nothing from one that exists."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fleet.errors import OperatorMistake
from fleet.init import make_site
from fleet.places import CODE, KIT
from fleet.site.inventory import find_problems
from fleet.site.reader import read_source


@pytest.fixture(autouse=True)
def configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ansible reads its settings once in a process: a site of these tests must not be where later tests find them."""
    monkeypatch.setenv("ANSIBLE_CONFIG", str(KIT / "ansible.cfg"))


def make(directory: Path, *hosts: str) -> list[str]:
    lines: list[str] = []
    make_site(directory, hosts, lines.append)
    return lines


def groups(directory: Path) -> dict[str, list[str]]:
    read = yaml.safe_load((directory / "inventory/hosts.yml").read_text())
    return {group: list(content["hosts"]) for group, content in read.items() if content["hosts"]}


@pytest.mark.parametrize(
    ("hosts", "ps", "worker"),
    [
        (["a"], ["a"], ["a"]),
        (["a", "b"], ["a"], ["b"]),
        (["a", "b", "c"], ["a", "b"], ["b", "c"]),
        (["a", "b", "c", "d"], ["a", "b"], ["b", "c", "d"]),
    ],
)
def test_hosts_get_jobs_and_the_inventory_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[str], ps: list[str], worker: list[str]
) -> None:
    site = tmp_path / "site"
    make(site, *hosts)
    assert groups(site) == {"chief": ["a"], "evaluator": ["a"], "tensorboard": ["a"], "ps": ps, "worker": worker}
    monkeypatch.chdir(site)
    read = read_source(str(site / "inventory"))
    assert list(map(str, find_problems(read))) == []
    assert read.variables["a"]["ansible_host"] == "a"


def test_an_address_is_the_hosts(tmp_path: Path) -> None:
    make(tmp_path / "site", "alpha=192.0.2.11", "192.0.2.12")
    read = yaml.safe_load((tmp_path / "site/inventory/hosts.yml").read_text())
    assert read["chief"]["hosts"] == {"alpha": {"ansible_host": "192.0.2.11"}}
    assert read["worker"]["hosts"] == {"192.0.2.12": {"ansible_host": "192.0.2.12"}}


def test_a_second_time_nothing_is_lost(tmp_path: Path) -> None:
    site = tmp_path / "site"
    *made, last = make(site, "a", "b")
    assert all(line.startswith("made ") for line in made)
    assert last == f"next: cd {site}, and type what README.md says there"
    (site / "programs/digits.py").write_text("mine = 1\n")
    (site / "site.yml").unlink()
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    lines = make(site, "c", "d")
    assert f"kept {site}/programs/digits.py as it was: what `psfleet init` writes differs" in lines
    assert f"kept {site}/inventory/hosts.yml as it was: what `psfleet init` writes differs" in lines
    assert f"kept {site}/ansible.cfg" in lines
    assert f"made {site}/site.yml" in lines
    assert {path: path.read_bytes() for path in before} == before
    assert make(site)  # no host need be named where there is an inventory


def test_in_the_folder_itself_it_says_only_what_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make(Path(), "a", "b")[-1] == "next: type what README.md says here"


def test_an_example_is_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_site(tmp_path / "site", [], lambda _: None, "cloud-static")
    for name in ("hosts.yml", "group_vars/all.yml"):
        assert (tmp_path / "site/inventory" / name).read_text() == (KIT / "inventory/cloud-static" / name).read_text()
    monkeypatch.chdir(tmp_path / "site")
    assert find_problems(read_source(str(tmp_path / "site/inventory"))) == []


@pytest.mark.parametrize(
    ("hosts", "example", "message"),
    [
        ([], "lab", "--example is 'lab'; expected one of cloud-aws, "),
        (["a"], "cloud-aws", "a is named beside --example"),
    ],
)
def test_a_wrong_example_is_named(tmp_path: Path, hosts: list[str], example: str, message: str) -> None:
    with pytest.raises(OperatorMistake, match=message):
        make_site(tmp_path / "site", hosts, print, example)
    assert not (tmp_path / "site").exists()


def test_settings_that_an_older_folder_lacks_are_named(tmp_path: Path) -> None:
    make(tmp_path, "a")
    file = tmp_path / "ansible.cfg"
    file.write_text(file.read_text().replace("force_handlers = True\n", "").replace("forks = 50", "forks = 5"))
    last = make(tmp_path)[-1]
    assert last.endswith("add them: [defaults] force_handlers = True")


def test_ansible_cfg_is_psfleets_without_a_path(tmp_path: Path) -> None:
    make(tmp_path, "a")
    ours, made = ((each / "ansible.cfg").read_text().splitlines() for each in (KIT, tmp_path))
    paths = {line for line in ours if "ansible/" in line or line.startswith(("roles_path", "inventory"))}
    assert len(paths) == 6
    assert set(ours) - set(made) == paths
    assert set(made) - set(ours) == {"inventory = inventory"}


def test_the_program_to_change_is_an_example_of_ours(tmp_path: Path) -> None:
    make(tmp_path, "a")
    for name in ("digits.py", "digits.npz"):
        assert (tmp_path / "programs" / name).read_bytes() == (CODE / "trainer/examples" / name).read_bytes()


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([], "no host is named"),
        (["a", "a"], "host 'a' is named twice"),
        (["a="], "host 'a=' has no address"),
        (["w[01:40]"], "host 'w[01:40]' is a range; expected each host by itself, as the shell writes w{01..40}"),
        (["w[01:40:2]"], "expected each host by itself, as the shell writes w{01..40..2}"),
        (["w[01:40]=10.0.0.1"], "as the shell writes w{01..40}"),
        (["[2001:db8::1]"], "expected an address such as 192.0.2.10 or node-1.example.org (leave out the brackets)"),
        (["a", "b,c"], "host 'b,c' has a comma; expected spaces between hosts: b c"),
        (["me@192.0.2.11"], "host 'me@192.0.2.11' has a login; expected it as ansible_user in group_vars/all.yml"),
        (["a=me@192.0.2.11"], "host 'a=me@192.0.2.11' has a login; expected it as ansible_user in group_vars/all.yml"),
        (["a_"], "host 'a_' can't have this name"),
        (["a;b"], "host 'a;b' can't have this name"),
        ([""], "host '' can't have this name"),
        (["a=300.0.0.1"], "ansible_host: '300.0.0.1'; expected an address"),
        (["a=192.0.2.1", "b=192.0.2.1"], "192.0.2.1"),
        (["all"], "'all'"),
    ],
)
def test_wrong_hosts_are_named_and_nothing_is_made(tmp_path: Path, hosts: list[str], message: str) -> None:
    with pytest.raises(OperatorMistake) as refused:
        make(tmp_path / "site", *hosts)
    assert message in str(refused.value)
    assert not (tmp_path / "site").exists()


def test_a_folder_with_a_space_is_quoted_in_the_command_to_type(tmp_path: Path) -> None:
    with pytest.raises(OperatorMistake, match=f"psfleet init '{tmp_path}/a site' alpha=192"):
        make(tmp_path / "a site")


def test_hosts_that_an_old_inventory_lacks_are_named(tmp_path: Path) -> None:
    make(tmp_path / "a b", "a", "b")
    *_, note, last = make(tmp_path / "a b", "a", "c")
    assert (
        note == f"a, c: not written, since {tmp_path}/a b/inventory/hosts.yml stays as it is; add there what it lacks"
    )
    assert last == f"next: cd '{tmp_path}/a b', and type what README.md says there"


def test_a_folder_in_another_site_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "site", "a")
    with pytest.raises(OperatorMistake, match=f"in the folder of the site {tmp_path}/site, whose commands"):
        make(tmp_path / "site/programs/new", "a")
    assert not (tmp_path / "site/programs/new").exists()


def test_a_folder_of_psfleets_own_is_refused() -> None:
    for directory in (KIT / "mysite", CODE):
        with pytest.raises(OperatorMistake, match="psfleet's own folder"):
            make(directory, "a")
    assert not (KIT / "mysite").exists()


def test_a_host_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorMistake, match=r"expected the folder first: psfleet init DIR .*a=10\.0\.0\.1"):
        make(tmp_path / "a=10.0.0.1", "b")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OperatorMistake, match="is no directory"):
        make(tmp_path / "file", "a")
    with pytest.raises(OperatorMistake, match="can't be written: Not a directory"):
        make(tmp_path / "file" / "site", "a")


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    (open_to_all := tmp_path / "site").mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(OperatorMistake, match=f"chmod o-w {open_to_all}"):
        make(open_to_all, "a")
