"""The packet filter's table as the role firewall writes it for one host of an inventory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fleet.site import firewall
from fleet.site.filters import FILTERS
from fleet.site.topology import cluster_spec

ROLE = Path(__file__).parents[1] / "roles/firewall"
SSH = 22
UID = 6006
FACTS = {
    "nft": "/usr/sbin/nft",
    "first": True,
    "ssh_ports": [SSH],
    "login_uid": 1000,
    "scraper_uid": None,
    "name_servers": [],
    "resolved": {},
    "peers": [],
    "vpn": {},
    "listening": [],
    "others": [],
}


def render(template: str, role: Path = ROLE, **values: object) -> str:
    """Render one of a role's templates as Ansible does."""
    loader = jinja2.FileSystemLoader(role / "templates")
    environment = jinja2.Environment(
        loader=loader, trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= FILTERS | {"quote": str}
    return environment.get_template(template).render(ansible_managed="Ansible managed", **values)


def table(
    groups: Mapping[str, Sequence[str]],
    hostvars: Mapping[str, Mapping[str, Any]],
    host: str,
    closes: str = "all",
    opened: Sequence[Mapping[str, Any]] = (),
    facts: Mapping[str, Any] = FACTS,
) -> str:
    """Render the table of one host."""
    spec = cluster_spec(groups, hostvars)
    rules = firewall.firewall_rules(spec, host, groups, hostvars[host])
    tunnel = firewall.firewall_tunnel(hostvars[host])
    return render(
        "firewall.nft.j2",
        firewall_sources=firewall.firewall_sources(spec),
        firewall_rules=rules,
        firewall_open=opened,
        firewall_uid=UID,
        firewall_tunnel=tunnel,
        __firewall_family="ip6" if ":" in tunnel.get("network", "") else "ip",
        __firewall_closes=closes,
        __firewall_facts=facts,
        __firewall_guarded=firewall.guarded_ports(rules),
    )


def program(kept: Path, running: Path) -> str:
    """Render the program that loads the table, with directories of its own."""
    return render("psfleet-firewall.j2", __firewall_kept=str(kept), __firewall_running=str(running))
