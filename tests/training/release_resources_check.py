"""Run as a process of its own: a turn ends while its iterator can't, and the next one makes its strategy.

The iterator's thread waits in the open of a pipe that is not written to. Prints how many steps were trained, whether
all was let go of, how many steps the next turn trained on the same worker, and whether that thread waits still. With
`other members` that turn has a worker less. With `ragged` or `sparse` elements that turn only makes its strategy. With
`by its handle` the iterator is let go of as TensorFlow does it, and there is no next turn.
"""

import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

from trainer.core.runtime import prepare_tensorflow

prepare_tensorflow()

import tensorflow as tf  # noqa: E402

from trainer.cluster.spec import ClusterConfig  # noqa: E402
from trainer.core.settings.config import Config  # noqa: E402
from trainer.tasks.in_process import start_cluster  # noqa: E402
from trainer.tasks.training import Training  # noqa: E402
from trainer.telemetry.counters import Counters  # noqa: E402
from trainer.training.release_resources import freed  # noqa: E402
from trainer.training.run_context import RunContext  # noqa: E402
from trainer.training.steps.remote import RemoteStepRunner  # noqa: E402
from trainer.training.strategies import make_strategy  # noqa: E402

PIPES = sys.argv[1]
READ, WAITS = 10, 11  # the examples that come from pipes: behind those of the steps below, and prefetched


class Waiting:
    def build_model(self):
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
        model.compile(optimizer="sgd", loss="mse")
        return model

    def train_dataset(self, context):
        def read(number):
            name = tf.strings.join([PIPES, tf.strings.as_string(number)])
            content = tf.cond(number < READ, lambda: "", lambda: tf.io.read_file(name))
            value = tf.fill([1], tf.cast(tf.strings.length(content), tf.float32))
            return value, value

        # One element after another: two that wait take both threads of a machine of two processors, and none is left
        # for those before them.
        options = tf.data.Options()
        options.experimental_optimization.map_and_batch_fusion = False
        options.experimental_optimization.map_parallelization = False
        return self.converted(tf.data.Dataset.range(WAITS + 1).map(read).batch(1)).prefetch(WAITS).with_options(options)

    def converted(self, batches):
        return batches


class Dense(tf.keras.Sequential):
    """Makes dense batches of ragged and sparse ones."""

    def train_step(self, data):
        x, y = data
        x = x.to_tensor() if isinstance(x, tf.RaggedTensor) else tf.sparse.to_dense(x)
        return super().train_step((tf.reshape(x, [-1, 1]), y))


class WaitingForVariants(Waiting):
    """The same with elements that TensorFlow hands on as variants."""

    def build_model(self):
        model = Dense([tf.keras.layers.Dense(1, input_shape=(1,))])
        model.compile(optimizer="sgd", loss="mse")
        return model

    def converted(self, batches):
        convert = tf.RaggedTensor.from_tensor if "ragged" in sys.argv else tf.sparse.from_dense
        return batches.map(lambda x, y: (convert(x), y))


class Quick(Waiting):
    def train_dataset(self, context):
        return tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat()


def waits() -> bool:
    try:
        os.close(os.open(f"{PIPES}{WAITS}", os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


for number in (READ, WAITS):
    os.mkfifo(f"{PIPES}{number}")
config = Config(program="release_resources_check:Waiting", strategy="parameter_server")
cluster = start_cluster("parameter_server", 1 + ("other members" in sys.argv), 1)
none: Any = None
progress: Any = SimpleNamespace(counters=Counters())  # all that an end of a generation asks of it
training = Training(RunContext(config, none, none, progress, none, None, None, none), cluster)
variants = {"ragged", "sparse"} & set(sys.argv)
program = WaitingForVariants() if variants else Waiting()
training._runner = runner = RemoteStepRunner(config, program, make_strategy(config, cluster), cluster.workers)
runner.call(3)
runner.call(1)
runner.join()
on_worker = tf.function(lambda: tf.ones([3]))
runner.model.kept = runner._coordinator.schedule(on_worker)  # as a lookup table does
runner._coordinator.join()
facts: dict[str, Any] = {"steps": int(runner.step.numpy())}
os.close(os.open(f"{PIPES}{READ}", os.O_WRONLY))  # which waits for the thread
time.sleep(1.0)
if "by its handle" in sys.argv:
    runner.close().handles.clear()
    facts["freed"] = freed(1.0)
else:
    del runner
    facts["freed"] = not training._let_go()
    cluster = ClusterConfig({**cluster.jobs, "worker": cluster.jobs["worker"][:1]}, cluster.job, cluster.index)
    strategy = make_strategy(config, cluster)
    if not variants:
        runner = RemoteStepRunner(config, Quick(), strategy, 1)
        runner.call(2)
        runner.join()
        facts["next steps"] = int(runner.step.numpy())
    facts["still waits"] = waits()
print(json.dumps(facts))
sys.stdout.flush()
os._exit(0)
