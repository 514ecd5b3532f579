"""TensorFlow's strategy for the one that the settings name."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import IPv4Address
from typing import Any

import tensorflow as tf

from trainer.cluster.members.fence import opened
from trainer.cluster.spec import ClusterConfig
from trainer.core.contracts import Strategy
from trainer.core.failures import naming_port
from trainer.core.settings.config import Config
from trainer.training.partitioners import make_partitioner
from trainer.training.tf_internals.workers import connected_workers, forget_traces

# Kept to the end of the process: to destroy one waits for its thread, which sleeps 30 s between looks at the members.
IN_STEP: list[Any] = []
# The members of this process's last parameter-server strategy.
FORMED: list[dict[str, list[str]]] = []
# How this process has written each ps's address to TensorFlow, and for which process there.
WRITTEN: dict[str, tuple[str, str]] = {}


def make_strategy(config: Config, cluster: ClusterConfig, processes: Mapping[str, str] | None = None) -> Strategy:
    """Make the strategy; of several members it waits for all, without a word and for ever.

    `processes` are the members' incarnations, by address. It takes a SIGTERM handler away that was set before.
    """
    if config.strategy == "parameter_server":
        servers = [write_address(one, (processes or {}).get(one, "")) for one in cluster.jobs["ps"]]
        cluster = replace(cluster, jobs=cluster.jobs | {"ps": servers})
        # For the same members again it uses the server that it has.
        if FORMED and (FORMED[-1] != cluster.jobs or connected_workers() != cluster.workers):
            stop_listening(int(cluster.address.rpartition(":")[2]))
        FORMED[:] = [cluster.jobs]
        partitioner = make_partitioner(config, len(cluster.jobs["ps"]))
        forget_traces()
        with naming_port(cluster.task, cluster.address):
            return tf.distribute.ParameterServerStrategy(make_resolver(cluster), variable_partitioner=partitioner)
    if config.strategy == "multi_worker_mirrored":
        with naming_port(cluster.task, cluster.address):
            IN_STEP.append(tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=make_resolver(cluster)))
        return IN_STEP[-1]
    if config.strategy == "mirrored":
        return tf.distribute.MirroredStrategy(own_devices())
    if config.strategy == "central_storage":
        return tf.distribute.experimental.CentralStorageStrategy()
    return tf.distribute.OneDeviceStrategy("/gpu:0" if tf.config.list_logical_devices("GPU") else "/cpu:0")


def write_address(address: str, process: str) -> str:
    """Write a ps's address to TensorFlow, in another way than for the process before.

    TensorFlow connects again as soon as a process has ended, is refused, and tries that address again after a second.
    An IPv4 address as IPv6 writes it is another one to TensorFlow, which connects at once, and the same to the kernel.
    """
    before, written = WRITTEN.get(address, (process, address))
    if before != process:
        host, _, port = address.rpartition(":")
        try:
            other = f"[::ffff:{IPv4Address(host)}]:{port}"
        except ValueError:
            other = address  # a name, or IPv6: there is no other way
        written = other if written == address else address
    WRITTEN[address] = (process, written)
    return written


def stop_listening(port: int) -> None:
    """Free the port of this process's last strategy: TensorFlow never stops a server, and can't start another there.

    Clients of the old server must connect to the new one: a worker's calls tell the coordinator their end there.
    """
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        # What is no socket, is closed meanwhile, or has lost its other end.
        with contextlib.suppress(OSError), opened(int(name)) as copy:
            # gRPC's sockets share their address with others (SO_REUSEADDR): it is enough that this one rests.
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port:
                copy.shutdown(socket.SHUT_RDWR)


def own_devices() -> list[str]:
    """Return this process's GPUs, else its CPU; TensorFlow lists those of the servers of its last cluster as well."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    return [name for name in names if not name.startswith(("/job:worker", "/job:ps"))]


def make_resolver(cluster: ClusterConfig) -> Any:
    """Tell TensorFlow who is in the cluster, as TF_CONFIG would."""
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.jobs), task_type=cluster.job, task_id=cluster.index, rpc_layer="grpc"
    )
