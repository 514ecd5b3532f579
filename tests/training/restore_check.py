"""Run as a coordinator: `train` a table on the cluster and write down every value, or `restore` and write them down.

Uses the trainer's own loop and checkpoints; reads the values from the variables themselves, shard by shard.
"""

import json
import os
import sys

import numpy as np
import tensorflow as tf

from trainer.checkpoints import RunDirectory
from trainer.cluster import Cluster
from trainer.config import Config
from trainer.loop import CustomLoop
from trainer.metrics import Progress
from trainer.notify import Notifier
from trainer.partitioners import make_partitioner
from trainer.program import load_program


def main(mode: str, shared: str, values_file: str) -> None:
    cluster = Cluster.from_tf_config(os.environ["TF_CONFIG"])
    config = Config(
        program="table:Table", run="restore", shared_dir=shared, steps=40, steps_per_call=5, partitioner_min_bytes=1024
    )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.jobs), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver, make_partitioner(config, 2))
    directory = RunDirectory(shared, "restore")
    progress = Progress(config, directory, Notifier())
    loop = CustomLoop(config, load_program(config.program), strategy, cluster.workers, directory, progress)
    if mode == "train":
        loop.train(lambda: False)
    else:
        loop.restore()
    shards = loop._model.table.embeddings.variables
    values = {"step": loop.step}
    values["table"] = np.concatenate([shard.numpy() for shard in shards])
    for number, variable in enumerate(loop._model.score.weights):
        values[f"score{number}"] = variable.numpy()
    for number, variable in enumerate(loop._model.optimizer.variables):
        values[f"optimizer{number}"] = variable.numpy()
    np.savez(values_file, **values)
    slots = [variable for variable in loop._model.optimizer.variables if variable.shape == (256, 16)]
    said = {
        "table": sorted(shard.device for shard in shards),
        "slots": [sorted(shard.device for shard in slot.variables) for slot in slots],
    }
    print(json.dumps(said), flush=True)
    os._exit(0)


main(*sys.argv[1:])
