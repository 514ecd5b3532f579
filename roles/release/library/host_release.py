#!/usr/bin/python
"""Put a release on a host beside what runs, or switch the host to it.

With `state=staged` it unpacks the release, writes its signature and the signers, and links its environment. Then it has
`psfleet-check-release` check signature and files, and take away what is not of the release. With `state=current` it
checks the release again, and has `current` lead there, and `previous` to the one before. `ansible-playbook` reaches it
through an action of the same name, which brings the archive; `fab` calls it itself.

Returns:
    changes: What was changed, a line for each.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

SUMS = "SHA256SUMS"


class Refused(Exception):
    """The host can't have the release; the message says why."""


class Release:
    """A release's directory on a host. With `check` nothing is written; `changes` says what would be."""

    def __init__(self, root: Path, name: str, program: Path, check: bool) -> None:
        self.root, self.path = root, root / "releases" / name
        self.changes: list[str] = []
        self._program, self._check = program, check

    def stage(self, archive: Path, signature: str, signers: str, environment: str) -> None:
        """Have the release there, checked."""
        # Also those above it: an earlier run, or root's umask, may have shut them to the tasks' user.
        for directory in (self.root, self.root / "envs", self.path.parent, self.path):
            self._make(directory)
        with tarfile.open(archive) as tar:
            sums = _read(tar, tar.getmember(SUMS))
            wanted, brought = parse(sums.decode()), set(tar.getnames())
            for member in tar:
                self._write(self.path / member.name, _read(tar, member))
        for name in wanted.keys() - brought:
            self._write(self.path / name, self._keep(name, wanted[name]))
        # By itself: another signature must not touch the files that the tasks run on.
        self._write(self.path / f"{SUMS}.sig", signature.encode())
        self._write(self.root / "signers", signers.encode())
        self._link(self.path / "env", f"../../envs/{environment}")
        if not self._check:
            if self.changes:
                sync_files(self.path)  # while what runs goes on: at the switch little is left
            self.changes += self._prove("--tidy")
        elif not self.changes:
            self._note_damage()

    def switch(self) -> None:
        """Have `current` lead to the release, once it was checked: it was when it was staged, some time ago."""
        if not self._check:
            self._prove()
        current = self.root / "current"
        if current.exists() and not current.is_symlink():
            raise Refused(f"{current} is no link; expected one to a release, or nothing. Remove it")
        if current.resolve() != self.path.resolve():
            if not self._check:
                sync_files(self.path)  # a power failure would leave empty files behind a link that counts
            if current.is_symlink():
                self._link(self.root / "previous", str(current.readlink()))
        self._link(current, f"releases/{self.path.name}")

    def _note_damage(self) -> None:
        """Note what tidying would fix: what is not of the release, and what its readers can't read."""
        try:
            self._prove()
        except Refused as refused:
            self.changes.append(str(refused))
        for path in self.path.rglob("*"):
            needed = 0o055 if path.is_dir() else 0o044
            if not path.is_symlink() and path.stat().st_mode & needed != needed:
                self.changes.append(f"let others read {path}")

    def _prove(self, *options: str) -> list[str]:
        command = [str(each) for each in (self._program, "--signers", self.root / "signers", *options, self.path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            raise Refused(f"{self._program} can't be run: {error.strerror}") from error
        if done.returncode:
            raise Refused(done.stderr.strip() or f"{self._program} ended with {done.returncode}")
        return done.stdout.splitlines()

    def _keep(self, name: str, digest: str) -> bytes:
        for place in (self.path, self.root / "current"):
            if (place / name).is_file() and hashlib.sha256(data := (place / name).read_bytes()).hexdigest() == digest:
                return data
        raise Refused(f"{name} is not in the archive, and the current release has another one. Start again")

    def _make(self, directory: Path) -> None:
        if not directory.is_dir() or directory.stat().st_mode & 0o7777 != 0o755:
            self.changes.append(f"made {directory}")
            if not self._check:
                directory.mkdir(parents=True, exist_ok=True)
                directory.chmod(0o755)

    def _write(self, path: Path, data: bytes) -> None:
        """Have a file so; one that is keeps its times, which tasks that run are compared with."""
        there = path.is_file() and not path.is_symlink()
        if there and path.stat().st_mode & 0o7777 == 0o644 and path.read_bytes() == data:
            return
        self.changes.append(f"wrote {path}")
        if self._check:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(data)
        partial.chmod(0o644)
        partial.replace(path)

    def _link(self, path: Path, target: str) -> None:
        if path.is_symlink() and os.readlink(path) == target:  # noqa: PTH115 (a Path would lose what it is compared with)
            return
        self.changes.append(f"linked {path} to {target}")
        if not self._check:
            partial = path.with_name(f".{path.name}.partial")
            partial.unlink(missing_ok=True)
            partial.symlink_to(target)
            partial.replace(path)


def sync_files(place: Path) -> None:
    """Have the disk hold all that was written to a directory's file system."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(number := ctypes.get_errno(), os.strerror(number), str(place))
    finally:
        os.close(descriptor)


def parse(sums: str) -> dict[str, str]:
    """Read a list of files, {name: hash}; its first line has the release's name."""
    return {line[66:]: line[:64] for line in sums.splitlines()[1:]}


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    if file is None or Path(member.name).is_absolute() or ".." in Path(member.name).parts:
        raise Refused(f"the archive holds {member.name!r}; expected files alone")
    return file.read()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # How far to go.
            "state": {"type": "str", "choices": ["staged", "current"], "required": True},
            "id": {"type": "str", "required": True},
            # Directory of releases and environments, with the link `current`.
            "root": {"type": "path", "default": "/opt/trainer"},
            # The archive of release_archive. A file that the current release has, byte by byte, may be
            # left out.
            "archive": {"type": "path"},
            # The signature of the list of files.
            "signature": {"type": "str"},
            # The signers of a release, as `ssh-keygen -Y verify` reads it.
            "signers": {"type": "str"},
            # Name of the environment of this host.
            "environment": {"type": "str"},
            # What checks a release.
            "program": {"type": "path", "default": "/usr/local/sbin/psfleet-check-release"},
        },
        required_if=[("state", "staged", ("archive", "signature", "signers", "environment"))],
        supports_check_mode=True,
    )
    os.umask(0o022)  # root's own may be 077, and the tasks' user is another
    given = module.params
    release = Release(Path(given["root"]), given["id"], Path(given["program"]), module.check_mode)
    try:
        if given["state"] == "staged":
            release.stage(Path(given["archive"]), given["signature"], given["signers"], given["environment"])
        else:
            release.switch()
    except (Refused, OSError, tarfile.TarError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=bool(release.changes), changes=release.changes[:50])


if __name__ == "__main__":
    main()
