"""Run as a coordinator: `train` a table on the cluster and write down every value, or `restore` and write them down.

Uses the trainer's own calls and checkpoints; reads the values from the variables themselves, shard by shard.
"""

import json
import os
import sys

import numpy as np

from trainer.cluster.spec import ClusterConfig
from trainer.core.program import load_program
from trainer.core.settings.config import Config
from trainer.run.directory import RunDirectory
from trainer.run.saves.checkpoint_state import CheckpointState
from trainer.run.saves.checkpoints import Checkpoints
from trainer.training.steps.remote import RemoteStepRunner
from trainer.training.strategies import make_strategy


def shards_of(variable):
    """Return a variable's shards; on a single ps it is whole."""
    return getattr(variable, "variables", [variable])


def main(mode: str, shared: str, values_file: str) -> None:
    cluster = ClusterConfig.from_tf_config(os.environ["TF_CONFIG"])
    config = Config(program="table:Table", run="restore", shared_dir=shared, partitioner_min_bytes=1024)
    program = load_program(config.program, config.program_args)
    runner = RemoteStepRunner(config, program, make_strategy(config, cluster), cluster.workers)
    model = runner.model
    checkpoints = Checkpoints(RunDirectory(shared, "restore"), CheckpointState(model, runner.step), config)
    if mode == "train":
        for _ in range(8):
            runner.call(5)
        runner.join()
        checkpoints.save_and_wait()
    else:
        assert checkpoints.restore() == 40
    shards = shards_of(model.table.embeddings)
    values = {"step": int(runner.step.numpy())}
    values["table"] = np.concatenate([shard.numpy() for shard in shards])
    for number, variable in enumerate(model.score.weights):
        values[f"score{number}"] = variable.numpy()
    for number, variable in enumerate(model.optimizer.variables):
        values[f"optimizer{number}"] = variable.numpy()
    np.savez(values_file, **values)
    slots = [variable for variable in model.optimizer.variables if variable.shape == (256, 16)]
    places = {
        "table": sorted(shard.device for shard in shards),
        "slots": [sorted(shard.device for shard in shards_of(slot)) for slot in slots],
    }
    print(json.dumps(places), flush=True)
    os._exit(0)


main(*sys.argv[1:])
