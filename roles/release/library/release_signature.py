#!/usr/bin/python
"""Sign a release on the control machine: the list of its files, with an SSH key. Say who may sign one.

Signs the archive's `SHA256SUMS` with `ssh-keygen -Y sign`. The archive stays as it is, whichever key signs it. What the
same key has signed already keeps its signature. A key that no inventory names is made at its first use, without a
passphrase, and stays on the control machine.

Returns:
    signature: Path of the signature, a file beside the archive.
    signers: Who may sign, as `ssh-keygen -Y verify` reads it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

NAMESPACE = "psfleet-release"
PRINCIPAL = "psfleet"
SUMS = "SHA256SUMS"
_PUBLIC = re.compile(r"(?P<kind>(?:ssh|sk|ecdsa)-[\w.@-]+) (?P<key>[A-Za-z0-9+/]+=*)(?: .*)?")


class SigningError(ValueError):
    """The list can't be signed. The message names the value, what was expected and the fix."""


def bare(public: str) -> str:
    """Return a public key without its comment.

    Raises:
        SigningError: it is none.
    """
    found = _PUBLIC.fullmatch(public.strip())
    if found is None:
        raise SigningError(
            f"{public.strip()[:60]!r} is no public key; expected a line such as ssh-ed25519 AAAAC3... alice@laptop, "
            "as a .pub file has it"
        )
    return f"{found['kind']} {found['key']}"


def make_key(path: Path) -> None:
    """Make a key where none is; of two that do so at once, the first one's stays."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{os.getpid()}")
    output = _ssh_keygen(["-q", "-t", "ed25519", "-N", "", "-C", "psfleet releases", "-f", str(made)])
    if output.returncode:
        raise SigningError(
            f"ssh-keygen made no key {str(path)!r}: {_last_line(output.stderr)}. Fix that, or name a key of yours in "
            "release_key"
        )
    try:
        path.hardlink_to(made)
    except FileExistsError:
        pass
    finally:
        made.unlink()
        made.with_name(f"{made.name}.pub").unlink()


def read_public(key: Path) -> str:
    """Return the public half of a key, without its comment."""
    if not key.is_file():
        raise SigningError(
            f"release_key: there is no file {str(key)!r}; expected a private SSH key, or the public one of a key that "
            "an agent holds. `ssh-keygen -t ed25519 -f KEY` makes one"
        )
    beside = key.with_name(f"{key.name}.pub")
    if beside.is_file():
        return bare(beside.read_text())
    if key.read_bytes()[:4] in (b"ssh-", b"ecds", b"sk-s", b"sk-e"):
        return bare(key.read_text())
    output = _ssh_keygen(["-y", "-P", "", "-f", str(key)])
    if output.returncode:
        raise SigningError(
            f"release_key: {str(key)!r} can't be read: {_last_line(output.stderr)}. Has it a passphrase? Then load it "
            "into an agent (ssh-add), and have its .pub file beside it"
        )
    return bare(output.stdout.decode())


def allow(keys: Sequence[str]) -> str:
    """Write who may sign, as ssh-keygen(1) has it under ALLOWED SIGNERS."""
    return "".join(f"{PRINCIPAL} {key}\n" for key in keys)


def pick_signers(key: Path, public: str, signers: Sequence[str]) -> list[str]:
    """Return whose releases the hosts take: those that the inventory names, else this key's.

    Raises:
        SigningError: the inventory names others alone.
    """
    allowed = [bare(each) for each in signers] or [public]
    if public not in allowed:
        raise SigningError(
            f"the key {str(key)!r} may sign no release of this cluster: release_signers in the inventory has not "
            f"{public!r}. Sign with a key that is there (release_key), or have this one added"
        )
    return allowed


def sign(key: Path, public: str, content: bytes, signature: Path) -> None:
    """Write the key's signature of a list, unless it is there: some kinds of keys sign otherwise each time."""
    with tempfile.TemporaryDirectory() as directory:
        signers = Path(directory, "signers")
        signers.write_text(allow([public]))
        verify = ["-Y", "verify", "-f", str(signers), "-I", PRINCIPAL, "-n", NAMESPACE, "-s", str(signature)]
        if signature.is_file() and _ssh_keygen(verify, content).returncode == 0:
            return
    output = _ssh_keygen(["-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key)], content)
    if output.returncode:
        raise SigningError(
            f"release_key: {str(key)!r} signs nothing: {_last_line(output.stderr)}. Has it a passphrase? Then load it "
            "into an agent: ssh-add"
        )
    replace(signature, output.stdout)


def sign_archive(archive: Path, key: Path, public: str) -> Path:
    """Write the signature of an archive's list beside the archive; return its path."""
    signature = archive.with_name(f"{archive.name.removesuffix('.tar.gz')}.sig")
    with tarfile.open(archive) as tar:
        sign(key, public, read(tar, tar.getmember(SUMS)), signature)
    return signature


def sign_with(archive: Path, key: str, own_key: Path, signers: Sequence[str]) -> tuple[Path, str]:
    """Sign an archive with a key, or where none is named with one of this machine's own.

    Returns:
        The signature's path, and who may sign.
    """
    used = Path(key or own_key).expanduser()
    if not key:
        make_key(used)
    public = read_public(used)
    allowed = pick_signers(used, public, signers)
    return sign_archive(archive, used, public), allow(allowed)


def read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


def replace(path: Path, data: bytes) -> None:
    """Write a file, unless it is so: it never is there in part."""
    if not path.is_file() or path.read_bytes() != data:
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(data)
        partial.replace(path)


def _ssh_keygen(arguments: Sequence[str], data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run it without a terminal, at which it would ask for a passphrase."""
    environment = {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}
    try:
        return subprocess.run(
            ["ssh-keygen", *arguments],
            input=data,
            capture_output=True,
            env=environment,
            start_new_session=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise SigningError(
            "there is no ssh-keygen on this machine, which signs releases; it comes with OpenSSH (openssh-client)"
        ) from error


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it says nothing"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # The archive, as release_archive writes it.
            "archive": {"type": "path", "required": True},
            # The private key, or a public one whose private half an agent has. Empty for the one in
            # `own_key`.
            "key": {"type": "str", "default": "", "no_log": False},
            # Where the key lies that is made where `key` is empty.
            "own_key": {"type": "path", "required": True, "no_log": False},
            # Public keys, one a line, whose releases the hosts take. Empty for the key that signs.
            "signers": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        signature, signers = sign_with(Path(given["archive"]), given["key"], Path(given["own_key"]), given["signers"])
    except SigningError as error:
        module.fail_json(msg=str(error))
    # A cache of this machine, and nothing that a host sees.
    module.exit_json(changed=False, signature=str(signature.resolve()), signers=signers)


if __name__ == "__main__":
    main()
