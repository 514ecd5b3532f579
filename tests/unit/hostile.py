"""Inventories that a hostile or a careless operator could write: a right one with one thing in it that is wrong."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

RUN = {"program": "trainer.examples.digits:Digits"}
SITE = {"cluster_shared_dir": "/srv/trainer", "cluster_uid": 6006, "trainer_run": RUN}
GROUPS = {"chief": ["head"], "ps": ["ps-0"], "worker": ["worker-0", "worker-1"]}

PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGzbTJnP8kEhbaqAJ0Wm0fZ1c6YgnmAIVw3ZAqt3rSgD"

Case = tuple[str, dict[str, list[str]], dict[str, dict[str, Any]]]

ADDRESSES: list[Any] = [
    "10.0.3.0/24", "10.0.3.13:22", "http://10.0.3.13", "ssh://w", "fe80::1%eth0", "fe80::1", "*.example.org",
    "10.0.3.*",
    "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1", "0.0.0.0", "0.1.2.3", "::", "127.0.0.1", "127.8.8.8", "::1",
    "localhost", "LOCALHOST", "localhost.localdomain", "ip6-localhost", "-oProxyCommand=id", "--help", " ", "", "\t",
    "10.0.3.13 ", "10.0.3.13\n", "a b", "010.0.3.13", "10.0.3", "10.0.3.256", "1.2.3.4.5", "0x0a000001", "167772173",
    "[fd00::1]", "fd00::1::2", "fd00::g", "::ffff:10.0.3.13", "admin@10.0.3.13", "w_1", "-w1", "w1-", "a..b",
    ".a", "a.",
    "$(id)", "`id`", "a;b", "a'b", 'a"b', "a\\b", "{{ ansible_default_ipv4.address }}", "{% raw %}", "ü.example.org",
    "a" * 64, "a." * 130 + "a", "w\x00",
    "2130706433", "127.1", "\uff11\uff10.0.3.13", "n\u03bfde.example.org",
    "169.254.7.7", datetime.date(2024, 1, 1),
    10.5, 1234, True, ["10.0.3.13"], {"a": 1}, None,
]  # fmt: skip
NAMES = [
    "$(reboot)", "`id`", "a b", "a\nb", "a'b", 'a"b', "a;b", "a/b", "../../etc/x", "-rf", "{{ 7*7 }}",
    "a" * 65, "ü", "",
    ".hidden", "a|b", "a&b", "a>b", "a*", "a\\b", "~root", "all", "ungrouped", "localhost", "fd00::1", "a$b",
    "a#b", "a%i", "chief", "gpu",
]  # fmt: skip
PATHS: list[Any] = [
    "data", "./data", "", "/", "/etc", "/etc/trainer", "/usr", "/usr/local/x", "/var", "/var/lib", "/var/lib/dpkg",
    "/var/log/x", "/boot", "/bin", "/dev/shm/x", "/proc/x", "/sys/x", "/run/x", "/root/x", "/home",
    "/home/me/x", "/tmp",
    "/tmp/x", "/var/tmp/x", "/opt", "/opt/trainer", "/opt/trainer/releases", "/srv", "/mnt", "/srv/../etc", "/srv/./x",
    "/srv//x", "/srv/x/", "//srv/x", "/srv/my share", "/srv/$(id)", "/srv/`id`", "/srv/a'b", '/srv/a"b', "/srv/a;b",
    "/srv/ä", "/srv/%i", "/srv/a\nb", "/srv/a:b", "/srv/a*", "~/x", "$HOME/x", "/srv/" + "a" * 300, "gs://bucket/x",
    "{{ x }}", 7, True, None, ["/srv/x"], "/lost+found", "/snap/x", "/efi/x", "/.shared/x",
]  # fmt: skip
NFS_PATHS = (
    "/etc",
    "/",
    "/srv/trainer",
    "/srv/trainer/nfs",
    "/var/lib/dpkg",
    "/srv/x/../../etc",
    "srv",
    None,
    "/home/a",
)
UIDS: list[Any] = [
    "trainer",
    "6006",
    0,
    99,
    -1,
    65534,
    65535,
    2**32,
    10**30,
    6006.0,
    6006.5,
    True,
    None,
    [],
    float("nan"),
]
PORTS: list[Any] = [0, -1, 22, 80, 1023, 65536, 10**30, "2400", "ssh", 2400.0, True, None, 2049, 9100]
COUNTS: list[Any] = [-1, "two", "2", 1.0, 1.5, True, None, 20_000_000, 10**30, float("inf"), [], 257]
SETTINGS: list[tuple[str, Any]] = [
    ("steps", 0), ("steps", -1), ("steps", 10**30), ("steps", 10**400), ("steps", float("inf")),
    ("steps", float("nan")),
    ("steps", "1000"), ("steps", 1.5), ("steps", True), ("steps", None), ("step", 10), ("Steps", 10),
    ("checkpoint_seconds", float("inf")), ("checkpoint_seconds", float("nan")), ("checkpoint_seconds", -1),
    ("checkpoint_seconds", 10**30), ("checkpoint_seconds", "30"), ("lease_seconds", float("inf")), ("lease_seconds", 1),
    ("heartbeat_timeout_seconds", float("nan")), ("ps_grace_seconds", float("inf")), ("log_seconds", 0),
    ("training_timeout_seconds", 1e300), ("strategy", "tpu"), ("strategy", ["mirrored"]), ("api", "fitt"),
    ("evaluation", True), ("program", "Digits"), ("program", "a.b:C\n"), ("program", "a b:C"), ("program", "a.b:$(id)"),
    ("program", ""), ("program", None), ("run", "../x"), ("run", "a b"), ("run", ""), ("run", "a" * 101), ("run", "-x"),
    ("run", 7), ("shared_dir", "/x"), ("local_run_dir", True), ("checkpoints_kept", 1), ("seed", -1), ("seed", 2**31),
    ("steps", "1e6"), ("checkpoint_seconds", "1e2"), ("run", datetime.date(2024, 1, 1)),
    ("program_args", {"since": datetime.date(2024, 1, 1)}),
    ("program_args", {"a": [{"b": datetime.datetime(2024, 1, 1)}]}),
    ("program_args", {"a": b"x"}), ("program_args", {"a": {"x", "y"}}), ("program_args", {"a": [b"x"]}),
    ("program_args", {"a": {1: 2}}), ("program_args", {"a b": 1}), ("program_args", {"class": 1}),
    ("program_args", {"a": float("nan")}), ("program_args", {"a": "x" * 20_000}), ("input", "remote"),
    ("input_sharding", "Auto"), ("checkpoints_kept_best", -1), ("checkpoints_best_mode", "MAX"),
    ("initial_weights", "s3://b/x"), ("initial_weights", "digits@x"), ("silent_seconds", 5), ("training_seconds", 60),
    ("partitioner", "big"), ("elastic", "yes"), ("steps_per_execution", "fast"), ("steps_per_execution", 10**30),
]  # fmt: skip
GROUP_NAMES = [
    "gpus", "evaluators", "nfs-server", "nfs_servers", "parameter_servers", "workers", "Worker", "chiefs",
    "tensor_board",
    "promethus", "alert-manager", "alertmanagers", "node_exporter", "grafana", "Prometheus",
    "master", "tensorboards", "ps_server", "wokrer", "monitoring", "bastion",
]  # fmt: skip
UNKNOWN: list[tuple[str, Any]] = [
    ("cluster_sharde_dir", "/x"), ("cluster_foo", 1), ("trainer_rn", {}), ("trainer_settings", {}),
    ("release_programm", ""),
    ("release_loc", "locks/cpu"), ("worker_task", 2), ("workers_tasks", 2), ("worker_ports", 2400), ("ps_task", 2),
    ("chief_ports", 1), ("gpu_counts", 1), ("gpu_number", 1), ("nvidia_driver_flavor", "open"),
    ("nvidia_driver_reboots", 1),
    ("storage_path", "/x"), ("storage_free_mb", 1), ("common_packges", []), ("common_uid", 7),
    ("nfs_server_path", "/etc"),
    ("nfs_option", "x"), ("tensorboard_prot", 7), ("evaluator_task", 1), ("drill_poweroff", "x"), ("Worker_tasks", 2),
    ("user", "x"), ("port", 99),
    ("psfleet_spec", {}), ("workertasks", 2), ("ansible_ssh_host", "10.0.3.99"), ("ansible_ssh_port", 99),
    ("ansible_ssh_user", "x"), ("ansible_usr", "x"), ("ansible_prot", 99), ("ansible_hosts", "10.0.3.99"),
    ("ansible_ssh_private_key", "x"), ("ansible_become_user", "nobody"), ("steps", 5), ("shared_dir", "/x"),
    ("\u0441luster_uid", 7), ("worker_tasks\u200b", 2), ("worker_tasks ", 2), ("worker-tasks", 2),
]  # fmt: skip
VALUES: list[tuple[str, Any]] = [
    ("release_program", 7), ("release_program", "-x"), ("release_lock", ""), ("release_lock", None),
    ("release_keep", 0),
    ("release_keep", -1), ("release_keep", 10**30), ("release_cache", ""), ("release_lock", "locks/cpu\n"),
    ("gpu_count", 0), ("gpu_count", 10**9), ("gpu_count", "8"), ("gpu_devices", ["0"]), ("gpu_devices", "GPU-1"),
    ("nvidia_driver_source", "ppa"), ("nvidia_driver_branch", 580), ("nvidia_driver_branch", "5; reboot"),
    ("nvidia_driver_version", "580*"), ("nvidia_driver_flavour", "OPEN"), ("nvidia_driver_reboot", "no"),
    ("nvidia_driver_reboot_timeout", float("inf")), ("nvidia_driver_mirror", "file:///etc"),
    ("nvidia_driver_mirror", "http://a\nSigned-By: x"), ("nvidia_driver_kernel", "6.1; reboot"),
    ("common_packages", "acl"), ("common_packages", ["acl; reboot"]), ("common_packages", ["-y"]),
    ("common_time_servers", ["10.0.0.1 iburst\nallow all"]), ("common_time_clients", ["0.0.0.0/0 x"]),
    ("common_time_clients", ["10.0.0.1/8"]), ("common_journal_size", "1G\n[Journal]"), ("common_journal_size", "big"),
    ("storage_clock_seconds", "$(id)"), ("storage_clock_seconds", -1), ("storage_free_mib", float("nan")),
    ("storage_rename_seconds", 10**30), ("trainer_start_seconds", "1min\nExecStart=/bin/sh"),
    ("trainer_start_seconds", 0),
    ("trainer_writable_paths", ["data"]), ("trainer_writable_paths", ["/"]), ("trainer_writable_paths", "/srv/data"),
    ("trainer_writable_paths", ["/srv/a b"]), ("trainer_writable_paths", ["/etc"]), ("trainer_limits", {"workers": {}}),
    ("trainer_limits", {"worker": {"memory_max": "101%"}}), ("trainer_limits", {"worker": {"memory_max": 4096}}),
    ("trainer_limits", {"worker": {"memory_max": "0G"}}), ("trainer_limits", {"all": {"memory": "1G"}}),
    ("trainer_limits", {"ps": {"cpu_quota": "0%"}}), ("trainer_limits", {"ps": {"cpu_weight": 10001}}),
    ("trainer_limits", {"worker": {"memory_max": "64M"}}), ("trainer_limits", {"worker": {"memory_max": "1.5G"}}),
    ("trainer_limits", {"worker": {"cpu_quota": "4%"}}), ("trainer_limits", {"worker": {"cpu_quota": 400}}),
    ("trainer_limits", {"worker": None}), ("trainer_limits", {5: {}}), ("trainer_limits", []),
    ("trainer_limits", {"worker": {"MemoryMax": "8G"}}), ("trainer_limits", {"ps": {"cpu_weight": "100"}}),
    ("trainer_limits", {"ps": {"tasks_max": 1}}), ("trainer_limits", {"ps": {"memory_max": "1G\nUser=root"}}),
    ("trainer_stop_seconds", float("inf")), ("trainer_watchdog_seconds", "30"), ("trainer_watchdog_seconds", 10**30),
    ("snapshots_kept", "24"), ("snapshots_kept", -1), ("snapshots_minutes", 0), ("snapshots_minutes", "1h\nUser=x"),
    ("nfs_server_options", "rw,no_root_squash) *(rw"), ("nfs_server_threads", 10**6), ("nfs_client_options", "hard\nx"),
    ("nfs_client_options", "a" * 3000),
    ("nfs_client_port", 0), ("ansible_port", "ssh"), ("ansible_port", 10**30), ("ansible_port", 0),
    ("ansible_user", "a b"),
    ("ansible_connection", "local"), ("ansible_connection", "docker"), ("ansible_become", False),
    ("ansible_ssh_common_args", '-o "Foo'), ("ansible_ssh_common_args", ["-C"]),
    ("ansible_ssh_common_args", "-J bastion"), ("ansible_ssh_extra_args", "-o ProxyCommand=id"),
    ("ansible_ssh_common_args", "-AJ bastion"), ("ansible_ssh_common_args", "bastion"),
    ("ansible_ssh_extra_args", '-o "ProxyJump = bastion"'), ("ansible_ssh_common_args", "-vvpJ"),
    ("ansible_ssh_args", "-C"), ("ansible_password", "x"), ("ansible_ssh_pass", "x"), ("ansible_ssh_password", "x"),
    ("ansible_become_password", "x"), ("ansible_become_pass", "x"), ("ansible_become_method", "su"),
    ("ansible_connection", "paramiko"), ("ansible_connection", "paramiko_ssh"), ("ansible_connection", "smart"),
    ("nfs_client_options", "vers=4.2,soft"), ("nfs_client_options", "softerr,hard"),
    ("ansible_timeout", "abc"), ("ansible_python_interpreter", "python3 -c"), ("ansible_python_interpreter", 3),
    ("cluster_own_groups", ["*"]), ("cluster_minimum", {"worker": float("nan")}), ("cluster_minimum", {"worker": 9}),
    ("cluster_minimum", {"ps": 0}), ("cluster_minimum", {"worker": 0}),
    ("cluster_minimum", {"workers": 1}), ("cluster_minimum", {5: 1}),
    ("cluster_minimum", {"worker": 1.5}), ("cluster_minimum", {"ps": "80%"}),
    ("cluster_minimum", {"chief": 0}), ("cluster_minimum", {"worker": True}), ("cluster_minimum", {"worker": -1}),
    ("drill_power_off", 'off "{host}'),
    ("drill_power_off", "off {host!r}"), ("drill_power_off", "off {host:>99999999}"), ("drill_power_off", "   "),
    ("drill_power_off", "off {host[0]}"), ("drill_power_on", "on {}"),
    ("common_time_clients", ["fe80::%a\nallow all/64"]), ("firewall_egress", ["fd00::%;}/64"]),
    ("firewall_egress", ["example.org"]), ("firewall_egress", "any"), ("firewall_closes", True),
    ("firewall_open", [{"port": 80, "from": ["fe80::%eth0/64"]}]), ("firewall_open", [{"port": 80, "form": []}]),
    ("firewall_open", [{"port": 80, "from": []}]), ("firewall_open", [{"port": "8010-8000"}]),
    ("firewall_open", [{"port": "80,443"}]), ("firewall_open", [{"port": 80, "protocol": "icmp"}]),
    ("firewall_open", [{"port": 2400}]), ("firewall_open", [{"port": "1-65535"}]), ("firewall_open", [9100]),
    ("firewall_open", [{"port": "2000-3000", "from": ["10.0.0.0/8", "::/0"]}]), ("firewall_confirm_seconds", 0),
    ("release_signers", ["ssh-ed25519 AAAA"]), ("release_signers", ["ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIDummyx mixed"]),
    ("release_signers", ["ssh-ed25519 !!!!"]), ("release_signers", "ssh-ed25519 AAAA"),
    ("release_signers", [f"{PUBLIC_KEY} a\x00b"]), ("release_signers", [f"{PUBLIC_KEY} a\u2028b"]),
    ("release_signers", [PUBLIC_KEY[:-8]]), ("release_signers", [f"cert-authority {PUBLIC_KEY}"]),
    ("trainer_secrets", {"A\n": "x"}), ("trainer_secrets", {1: "x"}), ("trainer_secrets", {"../A": "x"}),
    ("trainer_secrets", {"A": ""}), ("trainer_secrets", {"A": b"x"}), ("trainer_secrets", ["A"]),
    ("nvidia_driver_mirror", "http://host:99999/x"), ("nvidia_driver_mirror", "http://host:port/"),
    ("nvidia_driver_mirror", "http://me:secret@host/debian"), ("nvidia_driver_mirror", "http://-x/"),
    ("nvidia_driver_mirror", "http://host:0/x"), ("common_packages", ["openssh-server-"]),
    ("common_journal_size", "1"), ("common_journal_size", "999999999999999T"),
    ("cluster_own_groups", ["worker*"]), ("cluster_own_groups", ["gpu"]), ("cluster_own_groups", ["wo?ker"]),
    ("ansible_ssh_common_args", "-N"), ("ansible_ssh_common_args", "-f"), ("ansible_ssh_common_args", "-vV"),
    ("ansible_ssh_common_args", "-o RemoteCommand=id"), ("ansible_ssh_extra_args", "-o SessionType=none"),
    ("ansible_ssh_extra_args", "-o Include=/x"), ("ansible_become_flags", "-u nobody"), ("ansible_become_exe", "su"),
    ("ansible_shell_type", "fish"), ("ansible_shell_executable", "/bin/false"), ("ansible_ssh_executable", "/bin/x"),
    ("ansible_python_interpreter", "/bin/sh"), ("ansible_python_interpreter", "/usr/bin/python2.7"),
    ("ansible_python_interpreter", "/usr/bin/python3.9"), ("ansible_python_interpreter", "/usr/bin/../x/python3"),
    ("ansible_python_interpreter", "/opt/trainer/current/env/bin/python"), ("release_build_proof", "no"),
    ("nfs_server_options", "rw,async"), ("nfs_server_options", "ro"), ("nfs_client_options", "ro"),
    ("nfs_client_options", "vers=3"), ("nfs_client_options", "hard,nfsvers=4.1"),
    ("nfs_client_options", "hard,port=2050"),
    ("ansible_user", "-oProxyCommand=id"), ("ansible_ssh_private_key_file", "-x"), ("worker_index", "first"),
    ("worker_index", -1), ("worker_index", 10**30), ("cluster_own_groups", "bastion"), ("drills_destructive", "yes"),
    ("drill_power_off", "a\nb"), ("drill_power_off", "x {host.__class__}"), ("trainer_run", None), ("trainer_run", []),
    ("trainer_run", {}), ("trainer_run", "x"), ("trainer_run", {1: 2}), ("gpu_batch", "0%"), ("gpu_batch", 0),
]  # fmt: skip
ENCRYPTION: list[tuple[str, Any]] = [
    ("cluster_encryption", "yes"), ("cluster_encryption", 1), ("cluster_encryption", None),
    ("wireguard_network", "0.0.0.0/0"), ("wireguard_network", "10.0.3.0/24"), ("wireguard_network", "10.88.0.0/16"),
    ("wireguard_network", "10.88.0.1/16"), ("wireguard_network", "fd00::/127"), ("wireguard_network", "fe80::/64"),
    ("wireguard_network", "224.0.0.0/4"), ("wireguard_network", "240.0.0.0/8"), ("wireguard_network", "0.0.0.0/8"),
    ("wireguard_network", "::ffff:10.0.0.0/104"), ("wireguard_network", "8.8.0.0/16"), ("wireguard_network", ""),
    ("wireguard_network", "127.0.0.0/8"), ("wireguard_network", 5), ("wireguard_network", "10.88.0.0"),
    ("wireguard_port", 0), ("wireguard_port", 65536), ("wireguard_port", "51820"), ("wireguard_port", None),
    ("wireguard_mtu", 1279), ("wireguard_mtu", 65441), ("wireguard_mtu", 1420.0), ("wireguard_userspace", "yes"),
    ("wireguard_keepalive_seconds", 0), ("wireguard_keepalive_seconds", 26), ("firewall_closes", "none"),
    ("wireguard_tunnel_address", "fd00::1"), ("wireguard_privat_key", "x"), ("cluster_encrypt", True),
]  # fmt: skip
TUNNEL_ADDRESSES: list[Any] = [
    "10.89.0.9", "10.88.0.0", "10.88.255.255", "10.88.0.2", "10.88.0.9/16", "010.88.0.9", "fd00::9", "w.example.org",
    "", None, 9,
]  # fmt: skip
# Each with the group prometheus and the group alertmanager on the chief's host.
MONITORING: list[tuple[str, Any]] = [
    ("metrics_port", "2700"), ("metrics_port", 80), ("metrics_port", 2222), ("metrics_port", 9100),
    ("metrics_port", 65536), ("metrics_port", None), ("prometheus_port", 9093), ("prometheus_port", 2222),
    ("alertmanager_port", 9090), ("node_exporter_port", 2700), ("node_exporter_port", 22),
    ("prometheus_retention_days", "30d"), ("prometheus_retention_days", 0), ("prometheus_retention_mib", "4G"),
    ("prometheus_goodput_percent", 0.5), ("prometheus_goodput_percent", "50%"), ("prometheus_straggler_percent", 100),
    ("prometheus_restarts", 0), ("prometheus_full_hours", float("inf")), ("prometheus_memory_hours", 10**30),
    ("prometheus_retension_days", 3), ("node_exporter_prot", 9100), ("promtheus_port", 9090),
    ("prometheus_targets", []), ("alertmanager_listen", "0.0.0.0:9093"),
    ("alertmanager_receivers", None), ("alertmanager_receivers", {}), ("alertmanager_receivers", ["team"]),
    ("alertmanager_receivers", [{}]), ("alertmanager_receivers", [{"name": ""}]),
    ("alertmanager_receivers", [{"name": "a"}, {"name": "a"}]), ("alertmanager_receivers", [{"name": "a\n"}]),
    ("alertmanager_receivers", [{"name": "a", "webhook_config": []}]),
    ("alertmanager_receivers", [{"name": "a", "slakc_configs": []}]),
    ("alertmanager_receivers", [{"name": "a", "webhook_configs": {}}]), ("alertmanager_receivers", [{5: 6}]),
    ("alertmanager_routes", {}), ("alertmanager_routes", ["team"]), ("alertmanager_routes", [{"receiver": "team"}]),
    ("alertmanager_routes", [{"routes": [{"receiver": "team"}]}]), ("alertmanager_global", []),
]  # fmt: skip
NOTIFICATIONS: list[tuple[str, Any]] = [
    ("notify_webhook", "ftp://x"), ("notify_webhook", "http://"), ("notify_webhook", "http://me:pw@x/"),
    ("notify_webhook", "http://x:99999/"), ("notify_webhook", "http://x\n"), ("notify_webhook", ["http://x"]),
    ("notify_webhook_secret", "ABSENT"), ("notify_webhook_secret", "../x"), ("notify_command", "mail me"),
    ("notify_command", "/home/me/page"), ("notify_command", "/tmp/page now"), ("notify_command", "/root/page"),
    ("notify_command", '/bin/page "half'), ("notify_absent_seconds", "600"), ("notify_webhok", "http://x"),
]  # fmt: skip
DIFFERENT: list[tuple[str, Any]] = [
    ("cluster_uid", 7000), ("cluster_shared_dir", "/srv/other"), ("trainer_run", RUN | {"steps": 5}),
    ("trainer_run", RUN | {"program": "a.b:C"}), ("release_lock", "locks/cuda"), ("release_program", "../x"),
    ("cluster_own_groups", ["x"]), ("cluster_encryption", True), ("wireguard_network", "fd00:5::/64"),
]  # fmt: skip


def inventory(groups: dict[str, list[str]], hosts: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A right inventory of four machines, with a case laid over it: its groups, and variables of a host or of all."""
    groups = GROUPS | groups
    names = list(dict.fromkeys(host for group in groups.values() for host in group))
    hostvars = {
        name: {**SITE, "ansible_host": f"10.0.3.{10 + i}", **hosts.get("all", {}), **hosts.get(name, {})}
        for i, name in enumerate(names)
    }
    return {"all": names, "ungrouped": [], **groups}, hostvars


def cases() -> Iterator[Case]:
    for value in ADDRESSES:
        yield f"ansible_host {value!r:.60}", {}, {"worker-1": {"ansible_host": value}}
    for value in ("10.0.3.12", "10.0.3.012", "10.0.3.12/32", "127.0.0.1", "", "w 1"):
        yield f"cluster_address {value!r}", {}, {"worker-1": {"cluster_address": value}}
    same = {"worker-0": {"ansible_host": "FD00:0::1"}, "worker-1": {"ansible_host": "fd00::1"}}
    yield "one IPv6 address in two spellings", {}, same
    yield (
        "one name in two spellings",
        {},
        {h: {"ansible_host": n} for h, n in (("worker-0", "W.x"), ("worker-1", "w.X"))},
    )
    yield "a board at a worker's address", {"tensorboard": ["tb"]}, {"tb": {"ansible_host": "10.0.3.12"}}
    yield "two names of one machine", {}, {"worker-1": {"ansible_host": "10.0.3.12", "cluster_address": "10.0.9.9"}}
    one = {
        "ps-0": {"cluster_address": "10.0.9.9"},
        "worker-1": {"ansible_host": "10.0.9.9", "cluster_address": "10.0.9.8"},
    }
    yield "one machine by its two addresses", {}, one
    uuid = {"gpu_devices": ["GPU-8e0e2a41-30d1-4fa0-8a3c-4a1f0a3c1b11"]}
    yield "one GPU in two hosts", {"gpu": ["worker-0", "worker-1"]}, {"worker-0": uuid, "worker-1": uuid}
    driver = {"gpu_count": 1, "nvidia_driver_branch": "580", "nvidia_driver_version": "575.57.08"}
    yield "a driver of another branch", {"gpu": ["worker-0", "worker-1"]}, {"all": driver}
    nfs = {"cluster_nfs_dir": "/srv/nfs", "nfs_client_port": 2050}
    yield "a port on which our NFS server does not listen", {"nfs_server": ["head"]}, {"all": nfs}
    for name in NAMES:
        yield f"host {name!r:.60}", {"worker": ["worker-0", name]}, {}
    for value in PATHS:
        yield f"cluster_shared_dir {value!r:.60}", {"evaluator": ["head"]}, {"all": {"cluster_shared_dir": value}}
    for value in NFS_PATHS:
        yield f"cluster_nfs_dir {value!r}", {"nfs_server": ["head"]}, {"all": {"cluster_nfs_dir": value}}
    for value in ("/etc", "/opt/trainer", "local", "/tmp/x"):
        yield f"cluster_local_dir {value!r}", {}, {"all": {"cluster_shared_dir": "", "cluster_local_dir": value}}
    for value in UIDS:
        yield f"cluster_uid {value!r}", {}, {"all": {"cluster_uid": value}}
    for value in PORTS:
        yield f"worker_port {value!r}", {}, {"worker-1": {"worker_port": value}}
    yield "worker_port of ps", {"ps": ["ps-0", "worker-1"]}, {"worker-1": {"worker_port": 2300}}
    yield "worker_port of SSH", {}, {"worker-1": {"worker_port": 2222, "ansible_port": 2222}}
    yield "tensorboard_port of chief", {"tensorboard": ["head"]}, {"head": {"tensorboard_port": 2222}}
    yield "ports beyond the last", {}, {"worker-1": {"worker_port": 65530, "worker_tasks": 10}}
    for value in COUNTS:
        yield f"worker_tasks {value!r}", {}, {"worker-1": {"worker_tasks": value}}
    for name, value in SETTINGS:
        yield f"trainer_run {name}: {value!r:.60}", {}, {"all": {"trainer_run": RUN | {name: value}}}
    for name in GROUP_NAMES:
        yield f"group {name!r}, whose host has another job", {name: ["worker-1"]}, {}
    for name, value in UNKNOWN:
        yield f"variable {name!r}", {}, {"worker-1": {name: value}}
    for name, value in VALUES:
        gpu = {"gpu": ["worker-0", "worker-1"]} if name.startswith(("gpu", "nvidia")) else {}
        yield f"{name} {value!r:.120}", gpu, {"all": ({"gpu_count": 1} if gpu else {}) | {name: value}}
    for name, value in ENCRYPTION:
        yield f"encrypted, {name} {value!r}", {}, {"all": {"cluster_encryption": True, name: value}}
    for value in TUNNEL_ADDRESSES:
        tunnels: dict[str, dict[str, Any]] = {
            "all": {"cluster_encryption": True, "wireguard_network": "10.88.0.0/16"},
            **{host: {"wireguard_address": f"10.88.0.{i}"} for i, host in enumerate(("head", "ps-0", "worker-0"), 1)},
            "worker-1": {"wireguard_address": value},
        }
        yield f"wireguard_address {value!r}", {}, tunnels
    inside = {"all": {"cluster_encryption": True}, "worker-1": {"ansible_host": "fd6c:1d0e:77b2::5"}}
    yield "a host whose own address is one of the tunnels'", {}, inside
    for name, value in MONITORING:
        watched = {"prometheus": ["head"], "alertmanager": ["head"]}
        yield f"watched, {name} {value!r}", watched, {"all": {name: value}}
    for name, value in NOTIFICATIONS:
        yield f"notified, {name} {value!r}", {}, {"all": {"trainer_run": RUN | {name: value}}}
    for name, value in DIFFERENT:
        yield f"{name} of one host: {value!r:.60}", {}, {"worker-1": {name: value}}
    yield "no chief", {"chief": []}, {}
    yield "two chiefs", {"chief": ["head", "ps-0"]}, {}
    yield "two evaluators", {"evaluator": ["head", "ps-0"]}, {}
    yield "two NFS servers", {"nfs_server": ["head", "ps-0"]}, {"all": {"cluster_nfs_dir": "/srv/nfs"}}
