"""Who speaks with whom through WireGuard, what an inventory may say of it, and in which order things change."""

from __future__ import annotations

import base64
import ipaddress
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.site import wireguard
from fleet.site.firewall import firewall_rules, firewall_sources, firewall_tunnel
from fleet.site.preflight import preflight_problems
from fleet.site.topology import ENDPOINT, MEMBER, cluster_spec, host_tasks
from fleet.site.wireguard import WireguardError, is_key, keys_text, merge_keys, read_keys, tunnel_address
from tests.rendered_firewall import table
from tests.rendered_wireguard import files

ROOT = Path(__file__).parents[2]
GROUPS = {"chief": ["head"], "ps": ["ps-0"], "worker": ["worker-0"], "nfs_server": ["store"]}
SITE = {
    "cluster_shared_dir": "/srv/trainer",
    "cluster_uid": 6006,
    "cluster_nfs_dir": "/srv/nfs/trainer",
    "cluster_encryption": True,
    "trainer_run": {"program": "trainer.examples.digits:Digits"},
}
HOSTS = ("head", "ps-0", "worker-0", "store")


def key(number: int) -> str:
    return base64.b64encode(bytes([number]) * 32).decode()


KEYS = {host: key(number) for number, host in enumerate(HOSTS)}


def hostvars(**hosts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        host: SITE | {"ansible_host": f"192.0.2.{number}"} | hosts.get(host.replace("-", "_"), {})
        for number, host in enumerate(HOSTS, 11)
    }


def problems(tmp_path: Path, **hosts: dict[str, Any]) -> list[str]:
    site = {host.replace("-", "_"): hosts.get("all", {}) | hosts.get(host.replace("-", "_"), {}) for host in HOSTS}
    return preflight_problems(GROUPS | {"all": list(HOSTS)}, hostvars(**site), "2.19.4", [str(tmp_path)])


def test_a_hosts_address_is_its_own_beside_any_other_host() -> None:
    addresses = [ipaddress.ip_address(tunnel_address(f"worker-{number}", {})) for number in range(300)]
    assert len(set(addresses)) == 300
    assert all(address in ipaddress.ip_network(wireguard.NETWORK) for address in addresses)
    assert tunnel_address("worker-0", {"wireguard_address": "FD00::00:1"}) == "fd00::1"
    with pytest.raises(WireguardError, match=r"host 'a' has no wireguard_address, and 10\.88\.0\.0/16 has too few"):
        tunnel_address("a", {"wireguard_network": "10.88.0.0/16"})


def test_tasks_and_doors_have_the_tunnels_addresses_and_packets_the_others() -> None:
    values = hostvars(worker_0={"cluster_address": "198.51.100.7", "wireguard_port": 51999})
    spec = cluster_spec(GROUPS, values)
    inside = {host: tunnel_address(host, values[host]) for host in HOSTS}
    assert f"[{inside['worker-0']}]:2400" in host_tasks(spec, "head")[0]["tf_config"]
    assert "192.0.2." not in host_tasks(spec, "head")[0]["tf_config"]
    sources = firewall_sources(spec)
    assert set(sources[MEMBER]) == set(inside.values())
    assert set(sources[ENDPOINT]) == {"192.0.2.11", "192.0.2.12", "198.51.100.7", "192.0.2.14"}
    [rule] = [
        rule for rule in firewall_rules(spec, "worker-0", GROUPS, values["worker-0"]) if rule["protocol"] == "udp"
    ]
    assert (rule["ports"], rule["sources"]) == ([51999], [ENDPOINT])
    assert firewall_tunnel(values["head"]) == {"interface": "psfleet0", "network": wireguard.NETWORK}


def test_without_encryption_nothing_speaks_of_it() -> None:
    values = hostvars(**{host.replace("-", "_"): {"cluster_encryption": False} for host in HOSTS})
    spec = cluster_spec(GROUPS, values)
    assert ENDPOINT not in firewall_sources(spec)
    assert firewall_tunnel(values["head"]) == {}
    assert "psfleet0" not in table(GROUPS, values, "head")
    assert "192.0.2.13:2400" in host_tasks(spec, "head")[0]["tf_config"]


def test_a_host_knows_all_others_whose_key_is_known(tmp_path: Path) -> None:
    values = hostvars(store={"ansible_host": "2001:db8::4"})
    known = {host: KEYS[host] for host in ("head", "worker-0", "store")}
    text = files(GROUPS, values, "head", known, tmp_path)["peers.conf"]
    assert text.count("[Peer]") == 2
    assert "ps-0" not in text
    assert KEYS["head"] not in text
    assert f"# worker-0\nPublicKey = {KEYS['worker-0']}\n" in text
    assert f"AllowedIPs = {tunnel_address('worker-0', {})}/128\nEndpoint = 192.0.2.13:51820\n" in text
    assert "Endpoint = [2001:db8::4]:51820\nPersistentKeepalive = 10\n" in text


def test_the_mtu_is_found_where_the_inventory_names_none(tmp_path: Path) -> None:
    found = files(GROUPS, hostvars(), "head", KEYS, tmp_path)
    assert "mtu=auto\n" in found["psfleet-wireguard"]
    assert "MTU" not in found["psfleet0.conf"]
    named = files(GROUPS, hostvars(head={"wireguard_mtu": 8920}), "head", KEYS, tmp_path)
    assert "mtu=8920\n" in named["psfleet-wireguard"]
    assert "MTU = 8920\n" in named["psfleet0.conf"]


def test_keys_are_kept_of_hosts_that_say_nothing_and_go_with_their_hosts() -> None:
    kept = read_keys(keys_text(KEYS))
    assert kept == KEYS
    assert merge_keys(kept, {"ps-0": key(9)}, ["head", "ps-0", "worker-9"]) == {"head": KEYS["head"], "ps-0": key(9)}


def test_a_copied_host_is_named() -> None:
    with pytest.raises(WireguardError, match="the hosts head and ps-0 have the same key; expected one each"):
        merge_keys({"head": key(1)}, {"ps-0": key(1)}, HOSTS)


@pytest.mark.parametrize("text", ["", "head", key(1)[:-2], key(1)[:-1] + "!", base64.b64encode(bytes(31)).decode()])
def test_what_is_no_key_is_refused(text: str) -> None:
    assert not is_key(text)
    with pytest.raises(WireguardError, match=r"line 2 of wireguard-keys\.txt is 'head.*'; expected a host's name"):
        read_keys(f"# keys\nhead {text}\n")


def test_an_inventory_that_is_no_file_has_no_place_for_keys() -> None:
    with pytest.raises(WireguardError, match="this one is no file"):
        wireguard.keys_file(["head,"])
    assert wireguard.keys_file(["inventory/lab/hosts.yml"]) == Path("inventory/lab/wireguard-keys.txt")


def test_a_right_inventory_is_right_with_encryption(tmp_path: Path) -> None:
    assert problems(tmp_path) == []
    network = {"wireguard_network": "10.88.0.0/16"}
    numbers = {host.replace("-", "_"): {"wireguard_address": f"10.88.0.{n}"} for n, host in enumerate(HOSTS, 1)}
    assert problems(tmp_path, all=network, **numbers) == []


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ({"all": {"wireguard_network": "10.88.0.0/16"}}, "has no wireguard_address, and 10.88.0.0/16 has too few"),
        ({"head": {"wireguard_address": "fd00::1"}}, "has wireguard_address: fd00::1; expected an address in"),
        ({"head": {"wireguard_address": "fd6c:1d0e:77b2::"}}, "expected neither the first nor the last of"),
        ({"head": {"wireguard_address": "fd6c:1d0e:77b2::5"}, "ps_0": {"wireguard_address": "fd6c:1d0e:77b2:0::5"}},
         "the hosts head, ps-0 have the same wireguard_address fd6c:1d0e:77b2::5; expected one each"),
        ({"head": {"ansible_host": "fd6c:1d0e:77b2::9"}}, "which is in wireguard_network"),
        ({"head": {"firewall_closes": "none"}}, "has firewall_closes: none, and cluster_encryption is true"),
        ({"all": {"wireguard_network": "198.18.0.0/33"}}, "wireguard_network"),
        ({"all": {"wireguard_network": "8.8.8.0/24"}}, "it is no private network"),
        ({"head": {"wireguard_mtu": 1200}}, "expected auto, or a number of bytes from 1280 to 65440"),
        ({"head": {"wireguard_mtu": "Auto"}}, "expected auto, or a number of bytes from 1280 to 65440"),
        ({"head": {"wireguard_keepalive_seconds": 0}}, "expected a number of seconds from 1 to 25"),
        ({"all": {"cluster_encryption": "yes please"}}, "cluster_encryption"),
        ({"head": {"cluster_encryption": False}}, "cluster_encryption"),
    ],
)  # fmt: skip
def test_what_can_be_no_tunnel_is_refused_before_any_host_is_touched(
    tmp_path: Path, hosts: dict[str, dict[str, Any]], message: str
) -> None:
    found = problems(tmp_path, **hosts)
    assert any(message in problem for problem in found), found


def test_a_broken_file_of_keys_is_refused_before_any_host_is_touched(tmp_path: Path) -> None:
    (tmp_path / wireguard.KEYS_FILE).write_text("head nonsense\n")
    assert any("line 1 of wireguard-keys.txt is 'head nonsense'" in problem for problem in problems(tmp_path))


def test_only_who_was_asked_and_did_not_hear_is_deaf() -> None:
    answers = {
        "head": {"__wireguard_armed": {"rc": 0}},
        "ps-0": {"__wireguard_armed": {"rc": 1, "stderr": "the switch is -4 seconds from now"}},
        "worker-0": {"__wireguard_armed": {"unreachable": True, "msg": "Connection timed out"}},
        "store": {},
    }
    assert wireguard.deaf_hosts(GROUPS, answers, ["head", "ps-0", "worker-0"]) == [
        "ps-0: the switch is -4 seconds from now",
        "worker-0: Connection timed out",
    ]


def plays(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((ROOT / "ansible" / name).read_text())
    return found


def test_a_leaver_is_out_of_the_tunnel_before_its_tasks_are_stopped_and_a_tunnel_goes_last() -> None:
    names = [play["name"] for play in plays("training.yml")]
    order = [
        "Switch to the release",
        "Let go of hosts that have left",
        "Configure the training tasks",
        "Take tunnels down that are not wanted",
    ]
    assert sorted(order, key=names.index) == order


def test_the_tunnel_is_built_before_the_shared_path_and_takes_nothing_away_there() -> None:
    imported = [play["import_playbook"] for play in yaml.safe_load((ROOT / "site.yml").read_text())]
    assert imported.index("ansible/encryption.yml") < imported.index("ansible/storage.yml")
    main = (ROOT / "roles/wireguard/tasks/main.yml").read_text()
    assert "__wireguard_program }} add" in main
    assert "__wireguard_program }} sync" not in main


def test_every_host_of_a_tunnel_is_in_each_of_its_plays() -> None:
    wanted = set(wireguard.GROUPS)
    [wire] = plays("encryption.yml")
    assert set(wire["hosts"].split(":")) == wanted
    [_, _, rotate] = plays("rotate_keys.yml")
    assert set(rotate["hosts"].partition("{")[0].split(":")) == wanted
    for play in plays("training.yml"):
        if play["name"] in ("Let go of hosts that have left", "Take tunnels down that are not wanted"):
            assert set(play["hosts"].split(":")) == wanted
