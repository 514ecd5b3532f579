"""Print what every way to evaluate gives (`ways`), beside what `Model.evaluate` gives in one process.

`alone SHARED RUN STEP RUN STEP ...` prints the latter alone, for checkpoints of runs of `uneven:Slow`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import tensorflow as tf
import uneven

from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.run.directory import RunDirectory
from trainer.run.saves.checkpoint_reader import read_model
from trainer.tasks.local import local_cluster
from trainer.training.data.input import eval_dataset
from trainer.training.evaluation import make_evaluation

WORKERS = 2
# Every way with the programs that it must be right about, and those that it must refuse.
RIGHT = {
    "mirrored": ("Uneven", "OwnTestStep", "Stray", "OwnLoss"),
    "inline": ("Uneven", "OwnTestStep", "Stray", "OwnLoss", "NotAdding", "Generated"),
    "distributed": ("Uneven", "TwoOutputs", "Regularized", "OwnTestStep", "Stray", "OwnLoss", "NotAdding", "Files"),
    "exact": ("Numbered", "Files", "OneBatch"),
}
REFUSED = {
    "mirrored": ("Labels", "OwnTestFunction", "Endless", "Nothing"),
    "inline": ("Labels", "OwnTestFunction", "Endless", "Nothing"),
    "distributed": ("WholeData", "NotMerging", "OwnTestFunction", "KeepingTheLast", "Generated", "Nothing"),
    "exact": ("Uneven", "OwnTestStep", "OwnTestFunction", "Regularized", "Weighted", "TwoOutputs", "Generated"),
}


def parameter_servers():
    """Start a cluster in this process and return the strategy of its coordinator."""
    cluster = local_cluster(WORKERS, 2)
    # A worker that waits for a ps holds a thread; on a small machine there are fewer threads than such.
    settings = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4 * WORKERS)
    servers = tf.train.ClusterSpec({job: cluster[job] for job in ("worker", "ps")})
    for job in servers.jobs:
        for index in range(servers.num_tasks(job)):
            tf.distribute.Server(servers, job_name=job, task_index=index, protocol="grpc", config=settings)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    in_two = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=in_two)


def evaluate(way, name, strategy, directory):
    """Return what the way gives twice, what is alone right, and the state that is left in the model's metrics."""
    program = getattr(uneven, name)()
    config = Config(
        program=f"uneven:{name}",
        strategy="mirrored" if way == "mirrored" else "parameter_server",
        evaluation="exact" if way == "mirrored" else way,
    )
    with strategy.scope():
        model = program.build_model()
    run = make_evaluation(config, program, model, strategy, WORKERS)
    found = [run(), run()]
    saved = str(directory / f"{way}-{name}")
    tf.train.Checkpoint(model=model).write(saved)
    left = sum(abs(float(tf.reduce_sum(weight))) for metric in model.metrics for weight in metric.weights)
    return {"found": found, "alone": evaluate_alone(program, saved), "left": left}


def evaluate_alone(program, saved):
    model = program.build_model()
    tf.train.Checkpoint(model=model).read(saved).assert_existing_objects_matched()
    if program.model in (uneven.StrayModel, uneven.OwnLossModel):  # of several batches Keras gives the last one's
        [whole] = eval_dataset(program).unbatch().batch(uneven.EXAMPLES)
        return {name: float(value) for name, value in model.test_step(whole).items()}
    return model.evaluate(eval_dataset(program), verbose=0, return_dict=True)


def refusal(*arguments):
    try:
        return f"not refused: {evaluate(*arguments)}"
    except UserError as error:
        return str(error)


def ways():
    [device] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
    directory = Path(tempfile.mkdtemp())
    os.chdir(directory)
    for number in range(3):
        rows = [f"{row % 5} {(row + number) % uneven.LABELS}" for row in range(20)]
        (directory / f"uneven-{number}.txt").write_text("\n".join(rows) + "\n")
    found = {"right": {}, "refused": {}}
    servers = None
    for way in RIGHT:
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        if way != "mirrored":
            strategy = servers = servers or parameter_servers()
        found["right"][way] = {name: evaluate(way, name, strategy, directory) for name in RIGHT[way]}
        found["refused"][way] = {name: refusal(way, name, strategy, directory) for name in REFUSED[way]}
    return found


def alone(shared, *pairs):
    found = []
    for run, step in zip(pairs[::2], pairs[1::2], strict=True):
        program = uneven.Slow()
        model = program.build_model()
        read_model(RunDirectory(shared, run), model, int(step))
        found.append(model.evaluate(eval_dataset(program), verbose=0, return_dict=True))
    return found


print(json.dumps({"ways": ways, "alone": alone}[sys.argv[1]](*sys.argv[2:])), flush=True)
os._exit(0)
