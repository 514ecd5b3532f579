"""Passwords of Ansible's vaults: from the files that its settings name, or typed by the operator."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fleet.errors import OperatorMistake, first_line

_FIX = "Type it on a terminal, or name its file: ANSIBLE_VAULT_PASSWORD_FILE"


def open_vaults(loader: Any, asked: bool | str) -> str | None:
    """Give Ansible's loader what opens vaults, as ansible-playbook does; return a password that was typed.

    It is asked for, unless `asked` is one that was typed before. Raises OperatorMistake where a password's file can't
    be read, or none was typed.
    """
    import ansible.constants as settings
    from ansible.errors import AnsibleError
    from ansible.parsing.vault import VaultSecret, VaultSecretsContext

    secrets = []
    if settings.DEFAULT_VAULT_PASSWORD_FILE or settings.DEFAULT_VAULT_IDENTITY_LIST:
        from ansible.cli import CLI

        try:
            secrets = CLI.setup_vault_secrets(
                loader, settings.DEFAULT_VAULT_IDENTITY_LIST, auto_prompt=False, initialize_context=False
            )
        except AnsibleError as error:
            raise OperatorMistake(f"the vault's password can't be read: {first_line(error)}") from error
    password = asked if isinstance(asked, str) else _ask() if asked or settings.DEFAULT_ASK_VAULT_PASS else None
    if password is not None:
        secrets = [*secrets, (settings.DEFAULT_VAULT_IDENTITY, VaultSecret(password.encode()))]
    loader.set_vault_secrets(secrets)
    # Where values that are encrypted alone get their secrets from; it takes them once for a process.
    if context := VaultSecretsContext.current(optional=True):
        context.secrets = secrets
    else:
        VaultSecretsContext.initialize(VaultSecretsContext(secrets))
    return password


def _ask() -> str:
    try:
        password = getpass.getpass("Vault password: ").strip()  # as Ansible does
    except EOFError as error:
        raise OperatorMistake(f"--ask-vault-pass: no password was typed. {_FIX}") from error
    if not password:
        raise OperatorMistake(f"--ask-vault-pass: the password is empty. {_FIX}")
    return password


@contextmanager
def lend(password: str | None) -> Iterator[tuple[list[str], list[int]]]:
    """Give the arguments for ansible-playbook and the descriptors to leave open, so that it knows the password.

    A pipe: no file ever holds the password, and neither arguments nor environment show it.
    """
    if password is None:
        yield [], []
        return
    reader, writer = os.pipe()
    try:
        with os.fdopen(writer, "wb") as stream:
            stream.write(password.encode())
        yield ["--vault-password-file", f"/dev/fd/{reader}"], [reader]
    finally:
        os.close(reader)
