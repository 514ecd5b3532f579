#!/usr/bin/python
"""Load a host's packet filter on trial, keep it, or let members in before the table that names them is loaded.

The action `try_firewall` calls it with `tried` and, through another connection, with `confirmed`. A table that nobody
confirms is taken back by a timer of the host's own.

Returns:
    admitted: Addresses that were let in now.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

TABLE = ("inet", "psfleet")
# Loaded before the first table: a connection that the kernel doesn't track yet has unanswered replies, which the table
# would take for a stranger's.
WATCHING = "table inet psfleet { chain input { type filter hook input priority -10; ct state established accept; }; }"


def addresses_of(names: Iterable[str]) -> list[str]:
    """Return literal addresses, of a name those that this host's resolver has."""
    found: set[str] = set()
    for name in names:
        try:
            found.update(str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        except OSError:
            continue
    return sorted(found)


def elements(listing: str) -> set[str]:
    """Read the addresses of `nft --json list set`."""
    sets = [each["set"] for each in json.loads(listing)["nftables"] if "set" in each]
    return {str(address) for each in sets for address in each.get("elem", ())}


def is_kept(module: Any) -> bool:
    """Whether the table that is wanted was confirmed, and is loaded as it was."""
    if not Path(module.params["program"]).exists():  # in check mode, on a fresh host
        return False
    code, _, _ = module.run_command([module.params["program"], "is-kept", module.params["wanted"]])
    return bool(code == 0)


def others_are_open(listening: str, established: str) -> bool:
    """Whether anything but logins has a connection to another host; reads `ss -Hltn` and `ss -Hntup`.

    The table lets in logins by their port, whatever the kernel knows of them.
    """
    served = {line.split()[3].rpartition(":")[2] for line in listening.splitlines()}
    for line in established.splitlines():
        address, _, port = line.split()[3].rpartition(":")
        is_login = port in served and 'users:(("sshd' in line
        if not (is_login or address.strip("[]").startswith(("127.", "::1", "::ffff:127."))):
            return True
    return False


def watch(module: Any, nft: str) -> None:
    """Have the kernel know the connections that are open, where the table would take them for a stranger's."""
    ss = module.get_bin_path("ss", required=True)
    module.run_command([nft, "-f", "-"], data=WATCHING, check_rc=True)
    failed, listening, why = module.run_command([ss, "-Hltn"])
    failed_too, established, more = module.run_command([ss, "-Hntup", "state", "established"])
    if failed or failed_too:
        module.run_command([nft, "delete", "table", *TABLE])  # else the next run takes it for the site's
        module.fail_json(msg=f"ss can't list this host's connections: {(why or more).strip()}")
    if others_are_open(listening, established):
        time.sleep(module.params["track_seconds"])


def try_table(module: Any) -> None:
    """Load the table, after the timer that takes it back."""
    if is_kept(module):
        module.exit_json(changed=False)
    if module.check_mode:
        module.exit_json(changed=True)
    nft = module.get_bin_path("nft", required=True)
    unloaded, _, _ = module.run_command([nft, "list", "table", *TABLE])
    if unloaded:
        watch(module, nft)
    code, _, error = module.run_command(
        [module.params["program"], "try", module.params["wanted"], str(module.params["seconds"])]
    )
    if code:
        if unloaded:
            module.run_command([nft, "delete", "table", *TABLE])
        module.fail_json(msg=f"the table can't be loaded, and what was there before is there still: {error.strip()}")
    module.exit_json(changed=True)


def keep_table(module: Any) -> None:
    """Keep what is on trial."""
    code, _, error = module.run_command([module.params["program"], "confirm", module.params["wanted"]])
    if code:
        module.fail_json(msg=error.strip())
    module.exit_json(changed=True)


def admit(module: Any) -> None:
    """Add addresses to the set of members. A host without a table is open to them."""
    nft = module.get_bin_path("nft")
    if not nft:
        module.exit_json(changed=False, admitted=[])
    new: list[str] = []
    addresses = addresses_of(module.params["addresses"])
    for family, version in (("member4", 4), ("member6", 6)):
        code, listing, _ = module.run_command([nft, "--json", "list", "set", *TABLE, family])
        if code:
            module.exit_json(changed=False, admitted=[])
        wanted = {each for each in addresses if ipaddress.ip_address(each).version == version}
        missing = sorted(wanted - elements(listing))
        if missing and not module.check_mode:
            code, _, error = module.run_command([module.params["program"], "admit", family, *missing])
            if code:
                module.fail_json(msg=f"{', '.join(missing)} can't be let in: {error.strip()}")
        new += missing
    module.exit_json(changed=bool(new), admitted=new)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # `tried` loads the table unless what is loaded is what was kept; `confirmed` keeps what is on
            # trial; `admitted` lets addresses in to what every member may reach, in the table that is
            # loaded.
            "state": {"type": "str", "choices": ["tried", "confirmed", "admitted"], "required": True},
            # The host's program that loads and checks the table.
            "program": {"type": "path", "required": True},
            "wanted": {"type": "path", "required": True},
            # How long it is on trial.
            "seconds": {"type": "int", "default": 60},
            # How long open connections are only watched before the host's first table is loaded; logins
            # alone need it not.
            "track_seconds": {"type": "int", "default": 5},
            # Whom to let in, with `admitted`.
            "addresses": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    {"tried": try_table, "confirmed": keep_table, "admitted": admit}[module.params["state"]](module)


if __name__ == "__main__":
    main()
