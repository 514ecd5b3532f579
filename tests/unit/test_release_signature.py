"""A release is signed on the control machine, and a host takes none that is not, or that was changed since."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import host_release
import pytest
import release_archive
import release_signature
from release_signature import SigningError

from fleet.hosts.agent_request import pack

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "roles/release/files/psfleet-check-release"


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "someone@somewhere", "-f", path]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path / "key")


class Installed:
    """A release as the role installs it, in a directory of the test's own."""

    def __init__(self, root: Path) -> None:
        (root / "trainer").mkdir()
        (root / "trainer/__init__.py").write_text("answer = 42\n")
        (root / "locks").mkdir()
        (root / "locks/cpu-3.11.txt").write_text("a==1\n")
        self.release, archive = release_archive.build(str(root / "trainer"), "", str(root / "locks/cpu"))
        self.directory = root / "opt/releases" / self.release["id"]
        self.directory.mkdir(parents=True)
        self.archive = root / "archive.tar.gz"
        self.archive.write_bytes(archive)
        (self.directory / "env").symlink_to(f"../../envs/{self.release['environments']['3.11']['name']}")
        self.sums = self.directory / "SHA256SUMS"
        self.signers = root / "opt/signers"

    def sign(self, key: Path, *allowed: Path) -> bytes:
        signature = release_signature.sign_archive(self.archive, key, release_signature.read_public(key))
        with tarfile.open(self.archive) as tar:
            tar.extractall(self.directory)  # our own archive; Debian 12's Python knows no filter
        (self.directory / "SHA256SUMS.sig").write_bytes(signature.read_bytes())
        self.allow(*(allowed or (key,)))
        return signature.read_bytes()

    def allow(self, *keys: Path) -> None:
        self.signers.write_text(release_signature.allow([release_signature.read_public(each) for each in keys]))

    def check(self, *options: str | Path) -> subprocess.CompletedProcess[str]:
        command = [CHECK, *options, self.directory]
        return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


def test_a_release_as_it_was_built_and_signed_is_taken(installed: Installed, key: Path) -> None:
    installed.sign(key)
    for options in ((), ("--signers", installed.signers), ("--signers", installed.signers, "--tidy")):
        done = installed.check(*options)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def change(installed: Installed) -> None:
    (installed.directory / "trainer/__init__.py").write_text("answer = 43\n")


def lose(installed: Installed) -> None:
    (installed.directory / "trainer/__init__.py").unlink()


def shadow(installed: Installed) -> None:
    (installed.directory / "tensorflow.py").write_text("")


def lead_elsewhere(installed: Installed) -> None:
    (installed.directory / "trainer/__init__.py").rename(installed.directory.parent / "elsewhere.py")
    (installed.directory / "trainer/__init__.py").symlink_to("../../elsewhere.py")


def be_another(installed: Installed) -> None:
    installed.directory = installed.directory.rename(installed.directory.with_name("0123456789ab"))


def have_no_list(installed: Installed) -> None:
    installed.sums.unlink()


def have_another_environment(installed: Installed) -> None:
    (installed.directory / "env").unlink()
    (installed.directory / "env").symlink_to("/usr")


DAMAGE = [
    (change, "it is not as it was released: trainer/__init__.py: FAILED"),
    (lose, "it is not as it was released: .*trainer/__init__.py"),
    (shadow, r"it holds what is not of it: tensorflow\.py\. "),
    (lead_elsewhere, r"it holds what is not of it: trainer/__init__\.py\. "),
    (be_another, "its SHA256SUMS is another release's"),
    (have_no_list, "it has no SHA256SUMS, the list of its files"),
    (have_another_environment, "its link env leads to '/usr', which is none of its environments"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
@pytest.mark.parametrize("with_signature", [False, True])
def test_a_release_that_was_changed_is_refused_with_what_and_the_fix(
    damage: Callable[[Installed], None], message: str, with_signature: bool, installed: Installed, key: Path
) -> None:
    installed.sign(key)
    damage(installed)
    done = installed.check(*(["--signers", installed.signers] if with_signature else []))
    assert done.returncode == 1
    assert re.match(f"release {installed.directory.name}: {message}", done.stderr), done.stderr
    assert done.stderr.endswith("`ansible-playbook site.yml` fixes it\n")


def test_a_change_that_brings_its_own_list_is_found_by_the_signature_alone(installed: Installed, key: Path) -> None:
    installed.sign(key)
    change(installed)
    files = {
        path.relative_to(installed.directory).as_posix(): path.read_bytes()
        for path in installed.directory.rglob("*")
        if path.is_file() and path.name not in ("SHA256SUMS", "SHA256SUMS.sig")
    }
    installed.sums.write_bytes(release_archive.list_files(installed.release["id"], files))
    assert installed.check().returncode == 0
    refused = installed.check("--signers", installed.signers)
    assert "it is signed by none of those in" in refused.stderr
    assert "release_signers in the inventory says who may" in refused.stderr


def test_what_is_not_of_it_is_taken_away_and_named(installed: Installed, key: Path) -> None:
    installed.sign(key)
    shadow(installed)
    (installed.directory / "trainer/a b.py").symlink_to("/etc/passwd")
    done = installed.check("--signers", installed.signers, "--tidy")
    assert done.returncode == 0, done.stderr
    named = sorted(line.rpartition("/")[2] for line in done.stdout.splitlines())
    assert named == ["a b.py", "tensorflow.py"]
    assert installed.check().returncode == 0
    assert Path("/etc/passwd").exists()


def test_what_others_could_not_read_is_opened_and_named(installed: Installed, key: Path) -> None:
    """As unpacked where root's umask is 077: the archive has no directories."""
    installed.sign(key)
    (installed.directory / "trainer").chmod(0o700)
    (installed.directory / "release.json").chmod(0o600)
    done = installed.check("--signers", installed.signers, "--tidy")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"let others read {installed.directory}/release.json",
        f"let others read {installed.directory}/trainer",
    ]
    assert (installed.directory / "trainer").stat().st_mode & 0o777 == 0o755
    assert (installed.directory / "release.json").stat().st_mode & 0o777 == 0o644
    assert installed.check("--tidy").stdout == ""


def test_nothing_is_taken_away_by_a_list_that_nobody_signed(installed: Installed, key: Path, tmp_path: Path) -> None:
    installed.sign(make_key(tmp_path / "other"), key)
    shadow(installed)
    assert installed.check("--signers", installed.signers, "--tidy").returncode == 1
    assert (installed.directory / "tensorflow.py").exists()


def test_bytecode_that_a_hosts_python_left_is_passed_over(installed: Installed, key: Path) -> None:
    installed.sign(key)
    (installed.directory / "trainer/__pycache__").mkdir()
    (installed.directory / "trainer/__pycache__/__init__.cpython-311.pyc").write_bytes(b"")
    assert installed.check("--tidy").stdout == ""
    assert installed.check().returncode == 0
    (installed.directory / "trainer/__pycache__/x.py").write_text("")
    assert installed.check().returncode == 1


def test_the_signature_counts_for_releases_alone(installed: Installed, key: Path) -> None:
    """The same key may sign other things."""
    installed.sign(key)
    signature = installed.sums.with_name("SHA256SUMS.sig")
    signature.unlink()
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-n", "file", "-f", key, installed.sums], check=True)
    assert signature.exists()
    assert installed.check("--signers", installed.signers).returncode == 1


def test_keys_change_while_both_are_allowed(installed: Installed, key: Path, tmp_path: Path) -> None:
    new = make_key(tmp_path / "new")
    installed.sign(key, key, new)
    assert installed.check("--signers", installed.signers).returncode == 0
    installed.sign(new, key, new)
    assert installed.check("--signers", installed.signers).returncode == 0
    installed.allow(key)
    assert installed.check("--signers", installed.signers).returncode == 1


def test_a_key_that_the_inventory_does_not_name_signs_nothing(key: Path, tmp_path: Path) -> None:
    mine, other = (release_signature.read_public(each) for each in (key, make_key(tmp_path / "other")))
    assert release_signature.pick_signers(key, mine, []) == [mine]
    assert release_signature.pick_signers(key, mine, [f"{other} bob@desk", f"{mine} alice@laptop"]) == [other, mine]
    with pytest.raises(SigningError, match=r"may sign no release of this cluster: release_signers .* has not 'ssh-ed"):
        release_signature.pick_signers(key, mine, [f"{other} bob@desk"])


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_what_a_key_has_signed_it_signs_once(kind: str, installed: Installed, tmp_path: Path) -> None:
    """A second run changes nothing, though an ECDSA signature is another one each time."""
    key = make_key(tmp_path / kind, kind)
    first = installed.sign(key)
    assert installed.sign(key) == first
    assert installed.check("--signers", installed.signers).returncode == 0


def test_a_key_is_made_once_and_nobody_else_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "cache/release-key"
    release_signature.make_key(path)
    made = path.read_bytes()
    release_signature.make_key(path)
    assert path.read_bytes() == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["release-key"]
    assert release_signature.read_public(path).startswith("ssh-ed25519 ")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    socket = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    yield
    process.terminate()
    process.wait()


def test_a_key_with_a_passphrase_is_an_agents(
    agent: None, installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make_key(tmp_path / "guarded", passphrase="a passphrase")
    with pytest.raises(SigningError, match="Has it a passphrase\\? Then load it into an agent: ssh-add"):
        installed.sign(key)
    ask = tmp_path / "ask"
    ask.write_text("#!/bin/sh\necho a passphrase\n")
    ask.chmod(0o700)
    monkeypatch.setenv("SSH_ASKPASS", str(ask))
    subprocess.run(["ssh-add", "-q", key], env={**os.environ, "SSH_ASKPASS_REQUIRE": "force"}, check=True)
    key.unlink()
    public = key.with_name("guarded.pub")
    installed.sign(public)
    assert installed.check("--signers", installed.signers).returncode == 0


@pytest.mark.parametrize("text", ["", "ssh-ed25519", "-----BEGIN OPENSSH PRIVATE KEY-----", "ssh-ed25519 !!"])
def test_what_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(SigningError, match="is no public key; expected a line such as"):
        release_signature.bare(text)


def test_a_key_that_is_not_there_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SigningError, match=r"there is no file .*ssh-keygen -t ed25519 -f KEY"):
        release_signature.read_public(tmp_path / "none")


def test_current_moves_to_a_release_that_is_right_alone(installed: Installed, key: Path) -> None:
    installed.sign(key)
    root = installed.signers.parent
    release = host_release.Release(root, installed.release["id"], CHECK, False)
    (root / "current").symlink_to("releases/earlier")
    release.switch()
    release.switch()
    assert (root / "current").readlink() == Path("releases") / installed.release["id"]
    assert (root / "previous").readlink() == Path("releases/earlier")
    (root / "current").unlink()
    change(installed)
    with pytest.raises(host_release.Refused, match="it is not as it was released"):
        release.switch()
    assert not (root / "current").is_symlink()


def test_a_release_is_on_disk_before_current_leads_to_it(
    installed: Installed, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.sign(key)
    root, synced = installed.signers.parent, []
    monkeypatch.setattr(host_release, "sync_files", lambda place: synced.append((root / "current").is_symlink()))
    release = host_release.Release(root, installed.release["id"], CHECK, False)
    release.switch()
    assert synced == [False]
    release.switch()
    assert len(synced) == 1  # it led there before


def test_a_release_is_checked_at_each_start() -> None:
    unit = (ROOT / "roles/trainer/templates/trainer@.service.j2").read_text().splitlines()
    assert "ExecStartPre=/usr/local/sbin/psfleet-check-release" in unit  # without `+`: as the task's user


def test_what_is_staged_again_touches_nothing(installed: Installed, key: Path) -> None:
    """Tasks that run are compared with the times of its files."""
    signature = installed.sign(key).decode()
    root = installed.signers.parent

    def stage(check: bool = False) -> list[str]:
        release = host_release.Release(root, installed.release["id"], CHECK, check)
        release.stage(installed.archive, signature, installed.signers.read_text(), environment)
        return [line.replace(f"{installed.directory}/", "") for line in release.changes]

    environment = installed.release["environments"]["3.11"]["name"]
    root.chmod(0o755)
    stage()
    assert stage() == []
    change(installed)
    shadow(installed)
    assert stage(check=True) == ["wrote trainer/__init__.py"]
    assert stage() == ["wrote trainer/__init__.py", "took away tensorflow.py"]
    assert stage(check=True) == []
    shadow(installed)
    (installed.directory / "trainer").chmod(0o700)
    strange, shut = stage(check=True)
    assert "it holds what is not of it: tensorflow.py" in strange
    assert shut == f"let others read {installed.directory}/trainer".replace(f"{installed.directory}/", "")
    assert len(stage()) == 2
    assert installed.check("--signers", installed.signers).returncode == 0


def test_what_the_current_release_has_need_not_be_sent(installed: Installed, key: Path, tmp_path: Path) -> None:
    installed.sign(key)
    root = installed.signers.parent
    host_release.Release(root, installed.release["id"], CHECK, False).switch()
    (tmp_path / "trainer/more.py").write_text("more = True\n")
    made, archive = release_archive.build(str(tmp_path / "trainer"), "", str(tmp_path / "locks/cpu"))
    installed.archive.write_bytes(archive)
    signature = release_signature.sign_archive(installed.archive, key, release_signature.read_public(key)).read_text()
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(pack(archive, frozenset(installed.sums.read_text().splitlines())))
    with tarfile.open(packed) as tar:
        assert sorted(tar.getnames()) == ["SHA256SUMS", "release.json", "trainer/more.py"]
    release = host_release.Release(root, made["id"], CHECK, False)
    release.stage(packed, signature, installed.signers.read_text(), made["environments"]["3.11"]["name"])
    assert (release.path / "trainer/__init__.py").read_text() == "answer = 42\n"
    change(installed)
    (release.path / "trainer/__init__.py").unlink()
    with pytest.raises(host_release.Refused, match=r"trainer/__init__.py is not in the archive, .* has another one"):
        release.stage(packed, signature, installed.signers.read_text(), made["environments"]["3.11"]["name"])
