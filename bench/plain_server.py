"""A worker or a ps as TensorFlow's parameter-server guide has it; the cluster comes from TF_CONFIG."""

from __future__ import annotations

import tensorflow as tf


def main() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    )
    print("it serves at its port", flush=True)
    server.join()


if __name__ == "__main__":
    main()
