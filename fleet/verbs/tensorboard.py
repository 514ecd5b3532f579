"""`fab tensorboard`: TensorBoard through an SSH tunnel."""

from __future__ import annotations

from fleet.actions.console import Console
from fleet.errors import HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster


def open_tensorboard(cluster: Cluster, console: Console, port: int) -> None:
    """Lead a port of this machine to TensorBoard until the operator leaves: strangers don't reach it."""
    url = cluster.inventory.tensorboard_url
    if url is None:
        raise OperatorMistake(
            "group tensorboard is empty; expected a host that serves TensorBoard. Put one there, and run "
            "`ansible-playbook site.yml`"
        )
    address, _, remote_port = url.removeprefix("http://").rpartition(":")
    chief = cluster.inventory.chief.host
    with cluster.hosts.tunnel(chief, port, address.strip("[]"), int(remote_port)) as is_there:
        console.print_json("tensorboard", {"url": f"http://localhost:{port}"}, on_a_line=True)
        console.print(f"TensorBoard is at http://localhost:{port} until Ctrl-C")
        while is_there():
            console.sleep(1.0)
    raise HostsUnreachable({chief: "the connection was lost, and the tunnel with it"})
