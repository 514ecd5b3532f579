"""A worker or a parameter server: TensorFlow's own server, kept by systemd, told what to do by the coordinator."""

from __future__ import annotations

import logging
from functools import partial

from trainer.cluster import Cluster
from trainer.logs import without_chatter
from trainer.members import answers
from trainer.notify import Notifier

log = logging.getLogger(__name__)
# Longer than for the others' question: a machine that is busy beyond measure must not have its server killed as well.
SELF_CHECK_SECONDS = 10.0


def run_server(cluster: Cluster, notifier: Notifier) -> None:
    """Serve until the process is ended; it sets no signal handler, since `join` would never run one."""
    with without_chatter():
        import tensorflow as tf
    if cluster.job == "ps":
        tf.config.set_visible_devices([], "GPU")  # a ps computes nothing that a worker beside it could not use
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster.jobs), job_name=cluster.job, task_index=cluster.index, protocol="grpc"
    )
    log.info("%s serves at %s", cluster.task, cluster.address)
    notifier.ready(f"{cluster.task} serves at {cluster.address}")
    port = cluster.address.rpartition(":")[2]
    notifier.watch(partial(answers, f"localhost:{port}", SELF_CHECK_SECONDS))
    server.join()
