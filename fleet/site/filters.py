"""The filters of psfleet's playbooks and roles, each a function of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet import places
from fleet.site import (
    cluster_note,
    escaping,
    firewall,
    host_check,
    monitoring,
    nfs,
    nvidia,
    owed_restarts,
    paces,
    preflight,
    topology,
    wireguard,
)
from fleet.site.origin import origin
from fleet.site.outcome import outcome
from fleet.site.preflight.notes import preflight_notes
from fleet.site.schema.problems import describe_problems
from trainer.core.runtime import task_environment

FILTERS: dict[str, Callable[..., Any]] = {
    "environment_value": escaping.environment_value,
    "config_word": escaping.config_word,
    "limit_word": escaping.limit_word,
    "task_environment": task_environment,
    "cluster_spec": topology.cluster_spec,
    "host_tasks": topology.host_tasks,
    "metrics_targets": topology.metrics_targets,
    "firewall_rules": firewall.firewall_rules,
    "firewall_notes": firewall.firewall_notes,
    "firewall_refusals": firewall.firewall_refusals,
    "firewall_sources": firewall.firewall_sources,
    "firewall_tunnel": firewall.firewall_tunnel,
    "guarded_ports": firewall.guarded_ports,
    "names_among": firewall.names_among,
    "networks_of_family": firewall.networks_of_family,
    "of_family": firewall.of_family,
    "reached": firewall.reached,
    "uids_of": firewall.uids_of,
    "cluster_name": cluster_note.cluster_name,
    "cluster_problems": cluster_note.cluster_problems,
    "former_names": cluster_note.former_names,
    "member_addresses": host_check.member_addresses,
    "host_listeners": host_check.host_listeners,
    "port_problems": host_check.port_problems,
    "login_problem": host_check.login_problem,
    "sudo_fix": host_check.sudo_fix,
    "listen_address": monitoring.listen_address,
    "scrape_targets": monitoring.scrape_targets,
    "nfs_clients": nfs.nfs_clients,
    "nfs_source": nfs.nfs_source,
    "nvidia_driver": nvidia.nvidia_driver,
    "outcome": outcome,
    "slow_hosts": paces.slow_hosts,
    "owed": owed_restarts.owed,
    "preflight_problems": preflight.preflight_problems,
    "preflight_notes": preflight_notes,
    "describe_problems": describe_problems,
    "deaf_hosts": wireguard.deaf_hosts,
    "other_peers": wireguard.other_peers,
    "tunnel_address": lambda variables, host: wireguard.tunnel_address(host, variables),
    "tunnel_network": lambda variables: str(wireguard.tunnel_network(variables)),
    "wireguard_hosts": wireguard.wireguard_hosts,
    "gpu_lock": places.gpu_lock,
    "control_machine": lambda _: origin(),
    # Paths of the control machine, for the roles.
    "site_path": lambda path: str(places.site_file(path)),
    "lock_path": lambda path, gpu_hosts: str(places.lock_file(places.site(), path, bool(gpu_hosts))),
    "code_path": lambda name: str(places.CODE / name),
}
