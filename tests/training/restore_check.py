"""Run as a coordinator: `train` a table on the cluster and write down every value, or `restore` and write them down.

Uses the trainer's own loop and checkpoints; reads the values from the variables themselves, shard by shard.
"""

import json
import os
import sys

import numpy as np

from trainer.checkpoints import RunDirectory
from trainer.cluster import Cluster
from trainer.config import Config
from trainer.course import Course
from trainer.loop import train_with_loop
from trainer.metrics import Progress
from trainer.notify import Notifier
from trainer.program import load_program
from trainer.replicas import RemoteReplicas
from trainer.strategies import make_strategy


def main(mode: str, shared: str, values_file: str) -> None:
    cluster = Cluster.from_tf_config(os.environ["TF_CONFIG"])
    config = Config(
        program="table:Table", run="restore", shared_dir=shared, steps=40, steps_per_call=5, partitioner_min_bytes=1024
    )
    directory = RunDirectory(shared, "restore")
    progress = Progress(config, directory, Notifier())
    replicas = RemoteReplicas(config, load_program(config.program), make_strategy(config, cluster), cluster.workers)
    course = Course(config, replicas, directory, progress, lambda: False, None)
    if mode == "train":
        train_with_loop(replicas, course)
    else:
        course.restore()
    model = replicas.model
    shards = model.table.embeddings.variables
    values = {"step": int(replicas.step.numpy())}
    values["table"] = np.concatenate([shard.numpy() for shard in shards])
    for number, variable in enumerate(model.score.weights):
        values[f"score{number}"] = variable.numpy()
    for number, variable in enumerate(model.optimizer.variables):
        values[f"optimizer{number}"] = variable.numpy()
    np.savez(values_file, **values)
    slots = [variable for variable in model.optimizer.variables if variable.shape == (256, 16)]
    said = {
        "table": sorted(shard.device for shard in shards),
        "slots": [sorted(shard.device for shard in slot.variables) for slot in slots],
    }
    print(json.dumps(said), flush=True)
    os._exit(0)


main(*sys.argv[1:])
