"""Tell the user's errors from the cluster's, and what `python -m trainer` exits with for each.

systemd restarts a task whatever it exits with, except FINISHED and USER_ERROR.
"""

from __future__ import annotations

import contextlib
import dis
import errno
import itertools
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.core.own_frames import LINE_IN_MESSAGE, cause, user_line
from trainer.core.transport_errors import AMBIGUOUS, PORT_TAKEN, transport_error

FINISHED = 0
TRY_AGAIN = 75  # EX_TEMPFAIL: the infrastructure's trouble
USER_ERROR = 78  # EX_CONFIG: the same would happen again
STOPPED = 143  # 128 + SIGTERM

LAYER_IN_MESSAGE = re.compile(r"(?:\w+: )?Exception encountered when calling (?P<called>.+?)\.?$")  # Keras's
COLOUR_IN_MESSAGE = re.compile(r"\x1b\[\d*m")
# What TensorFlow calls a thing of the program's that was made before this process joined the cluster.
MADE_EARLY = re.compile(r"/job:localhost/\S+ (unknown device|not found)", re.IGNORECASE)
# What a lookup says of an id, as do the program's own tf.dynamic_partition and tf.gather; and the lookups' operations.
OUT_OF_RANGE = re.compile(r"(partitions|indices)\[[\d,]+\] = -?\d+ is not in \[0, \d+\)")
LOOKUP = re.compile(r"\b(embedding_lookup|rows_asked_for_once)")
OUT_OF_TABLE = (
    "an id is outside of a table. Ids go from 0 to its rows less one; where a table is split between the ps, these "
    "numbers are of a part. Give the Embedding as many rows as the greatest id and one more, or take ids modulo them, "
    "as keras.layers.Hashing does (docs/recommenders.md)"
)
# What Keras and TensorFlow refuse in a train_step without a word of what to do here.
FIXES = {
    "`merge_call` called while defining a new graph": "an optimizer can't be applied within tf.cond, an `if` or "
    "a loop over tensors, or a tf.function: loop in Python (`for _ in range(3)`); to accumulate gradients, add them up "
    "within a step; to leave out gradients that are not finite, apply tf.where(finite, gradient, "
    "tf.zeros_like(gradient)) (docs/programs.md)",
    "only supports singleton tf.Variables created on the first call": "a step is traced more than once, so make each "
    "variable once: in build_model, or in a `build` that returns when it was called before, as Keras's optimizers do "
    "with `self._built` (docs/programs.md)",
    "/job:localhost/": "the program uses a variable, table, optimizer, metric or model that was made before "
    "build_model was called: make it in build_model, which is called in the strategy's scope (docs/programs.md)",
    "tensor proto whose content is larger than 2GB": "a graph goes to each worker in one message, of 2 GiB at most: "
    "write the data to files, and read those in train_dataset (docs/input.md)",
    "Mixing different tf.distribute.Strategy objects": "build_model is called in the run's strategy: leave "
    "the program's own out, and choose with the run setting `strategy` (docs/training.md)",
    "Method requires being in cross-replica context": "a train_step runs in a replica already: call the function "
    "itself, without strategy.run, and leave strategy.reduce out (docs/programs.md)",
    "no attribute '_cluster_coordinator'": "the trainer has a ClusterCoordinator of its own, and calls train_dataset "
    "for each worker: return the dataset itself (docs/input.md)",
    "convert elements of <Compressed Sparse": "tf.data takes no matrix of SciPy: give it matrix.toarray(), or a "
    "tf.sparse.SparseTensor, of which tf.sparse.to_dense makes rows in map",
    "was not created in the distribution strategy scope": "make the whole model in build_model, with its layers and "
    "its optimizer (docs/programs.md)",
    "'ShardedVariable' object has no attribute": "that variable is split between the ps, and lacks some methods of a "
    "whole one: use tf.convert_to_tensor(variable), write rows with variable.scatter_update(tf.IndexedSlices(rows, "
    "ids)), or set partitioner to none (docs/training.md)",
    "SymbolicTensor' object has no attribute 'assign'": "a part of a variable can't be assigned: write rows with "
    "variable.scatter_update(tf.IndexedSlices(rows, ids)), or assign the whole value (docs/programs.md)",
    "Creating variables in `dataset_fn` is not allowed": "a layer that the datasets use makes its variables when it is "
    "called first: call it once in build_model, and keep it as an attribute of the program (docs/input.md)",
    "is out of scope and cannot be used here": "a metric, layer or step keeps a tensor in Python, as in a list, and "
    "another trace reads it: keep it in a variable of the model (add_weight) (docs/programs.md)",
    "before flags were parsed": "the command line is the trainer's, and no flags are parsed: take options as arguments "
    "of the constructor (program_args)",
    "Stateful RNNs (created with `stateful=True`) are not yet": "the next batch is another worker's: leave stateful "
    "out, and give whole sequences",
    "Detected unsupported operations when trying to compile graph": "XLA can't compile that: leave jit_compile=True "
    "out of compile, or give it to a tf.function of what it can",
    "cannot be called when determinism is enabled": "workers update in any order, so no two runs are the same: leave "
    "tf.config.experimental.enable_op_determinism out",
    "too large to convert to np.int32": "TensorFlow's own datasets fail with NumPy's types: leave the argument "
    "dtype_conversion_mode of experimental_enable_numpy_behavior out",
    "This optimizer can only be called for the variables it was originally built with": "a layer that train_step alone "
    "calls has no weights when the optimizer gets its own: build it in build_model, as layer.build((None, 8)), or give "
    "it its input (docs/keras3.md)",
    "Could not automatically infer the output shape / dtype of": "before training the model is called with what stands "
    "for the data's features. Where it takes something else, as features and labels, call it once in build_model with "
    "zeros of the right shapes, which builds it (docs/keras3.md)",
    "Please use `tf.keras.losses.Reduction.SUM` or": 'make the loss with reduction="none", and take '
    "tf.reduce_mean(loss(y, predicted)) (docs/programs.md)",
}
CALLED_BY_PROGRAM = (
    "build_model and callbacks may not train, evaluate or predict: the trainer does that. A callback calls the model, "
    "self.model(x), and gets the numbers of an evaluation as val_... (docs/callbacks.md). In the program's constructor "
    "fit, evaluate and predict of another model work (docs/programs.md)"
)
FIXES |= dict.fromkeys(
    ("`tf.keras.utils.experimental.DatasetCreator`", "ClusterCoordinator.create_per_worker_dataset"), CALLED_BY_PROGRAM
)
FIXES["None values not supported"] = (
    "a loss, metric or layer gets nothing, as the labels where data have none: have the dataset give (features, "
    "labels), or the model a train_step of its own"
)
FIXES |= dict.fromkeys(
    ("is incompatible with the layer: expected", "but input has incompatible shape"),
    "each element of a dataset is a batch: does it lack batch()? (docs/input.md)",
)
FIXES |= dict.fromkeys(
    ("(Unsupported object type", "convert Python sequence with mixed types"),
    "a column has values of several types, as None or NaN where a text is missing: fill those, as with "
    'frame["name"].fillna(""), or give the column one type',
)
FIXES["trying to register a dataset with tf.data service"] = (
    "the pipeline reads a variable, which hosts of the group data don't have: leave it out, or set input to local "
    "(docs/input.md)"
)
FIXES["; Permission denied"] = "on hosts tasks run as the user trainer, which must be allowed to use it (docs/input.md)"
FIXES |= dict.fromkeys(
    ("; No such file or directory", "No files match `file_pattern`"),
    "expected data on the host of each task that reads, under the same path (docs/input.md)",
)
ENDS_PYTHON = (
    "the program ended Python, as argparse does for options that it does not know. The command line is the trainer's: "
    "take options as arguments of the constructor (program_args), and raise an error instead of sys.exit"
)
INTERRUPTS = (
    "the program raised it, and nobody pressed Ctrl-C. To end the training, a callback sets self.model.stop_training = "
    "True; for what is wrong raise an error"
)
NOT_INSTALLED = (
    "install it; release_lock brings it to hosts, and release_program what is your own (docs/first-cluster.md)"
)
NODE_IN_MESSAGE = re.compile(r"\{\{node ([^}]+)\}\}")

# What CUDA says of a device that is broken, or gone: nothing runs on it until the process that uses it has ended.
DEVICE = re.compile(
    r"CUDA_ERROR_(ECC_UNCORRECTABLE|LAUNCH_FAILED|LAUNCH_TIMEOUT|HARDWARE_STACK_ERROR|NVLINK_UNCORRECTABLE"
    r"|DEVICE_UNAVAILABLE)|uncorrectable (ECC|NVLink) error|unspecified launch failure"
    r"|launch timed out and was terminated|hardware stack error|devices? is/are busy or unavailable",
    re.IGNORECASE,
)


# What a file system says that is full or gone, to each that asks it.
STORAGE = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ETIMEDOUT, errno.ENOTCONN)

# How a value's conversion on a server fails in TensorFlow, as a TypeError and with what the call said after it.
CONVERSION = re.compile(r"^Error while casting from dtype \w+ to \w+\. ")


# What a program may raise: to end Python, and as if by Ctrl-C.
RAISED = (Exception, SystemExit, KeyboardInterrupt)


class UserError(Exception):
    """An error that only the user can fix: the message says where it is and, if known, what to do."""

    def __str__(self) -> str:
        text = COLOUR_IN_MESSAGE.sub("", super().__str__())
        if text.startswith("in user code:"):  # AutoGraph puts a traceback before it, and Keras 3 the layer
            text = text.rpartition(f"{type(self).__name__}: ")[2].strip()
        return line_of_layer(text) or text


class EmptyPart(UserError):
    """A worker's data has ended, which it never does by itself unless there is none.

    Or a fault has broken off a call that TensorFlow runs again: its iterator was cancelled, and gives no more.
    """


class CheckpointMismatch(UserError):
    """A checkpoint does not fit the model that is built now."""


class Infrastructure(Exception):
    """Trouble of machines, network or storage: trying again later may work."""


@contextlib.contextmanager
def naming_port(task: str, address: str) -> Iterator[None]:
    """Name the port of a task's server, and what to do, where TensorFlow says only that it could not start there."""
    try:
        yield
    except Exception as error:
        port = address.rpartition(":")[2]
        if not PORT_TAKEN.search(str(error)) or not is_taken(int(port)):
            raise
        raise Infrastructure(
            f"another process has {task}'s port {port}: ss -ltnp 'sport = :{port}' names it. End it, or give the task "
            "another port (in an inventory chief_port, worker_port or ps_port)"
        ) from error


def is_taken(port: int) -> bool:
    """Return whether no process can listen at a port because another socket does."""
    try:
        with socket.create_server(("", port)):
            return False
    except OSError as error:
        return error.errno == errno.EADDRINUSE


class StalePath(Infrastructure):
    """The shared path's file handle is stale: nothing fixes it but the next start of the process, which mounts it."""


class Stopped(BaseException):
    """Someone asked the process to stop (SIGTERM), wherever it was: no `except Exception` is meant for it."""


def is_infrastructure(error: BaseException, program_file: Path | None = None) -> bool:
    """Return whether trying again could help. TensorFlow is consulted only if it is loaded already."""
    error = cause(error)
    if isinstance(error, Infrastructure | UserError):
        return isinstance(error, Infrastructure)
    if isinstance(error, OSError):
        return error.errno in STORAGE or not user_line(error, program_file)
    if isinstance(error, TypeError) and (conversion := CONVERSION.match(str(error))):
        return transport_error(AMBIGUOUS, str(error)[conversion.end() :]) is not None
    if "tensorflow" not in sys.modules:
        return False
    from tensorflow import errors

    if not isinstance(error, errors.OpError):
        return False
    # TensorFlow's file system says "<path>; <what the system says>", as an error of some kind or other.
    message = str(error)
    if MADE_EARLY.search(message):
        return False  # no server's name: the same words of another device are those of a server that is new
    storage = any(f"; {os.strerror(number)}" in message for number in STORAGE)
    classes = tuple(kind.__name__ for kind in type(error).__mro__)
    return storage or transport_error(classes, message) is not None or is_device(error)


def is_the_programs(error: BaseException) -> bool:
    """Return whether an error of the program's import or construction is its own: no signal's, nor the storage's."""
    if isinstance(error, OSError):
        return error.errno not in STORAGE
    return not (is_infrastructure(error) or is_signal(error))


def is_signal(error: BaseException) -> bool:
    """Return whether a KeyboardInterrupt is of Ctrl-C, or SIGINT: no `raise` is the last instruction of its traceback.

    Python's own handler, which raises it between two instructions, is no Python code, and has no frame.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if not isinstance(error, KeyboardInterrupt) or last is None:
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] != "RAISE_VARARGS"


def is_stale(error: BaseException) -> bool:
    """Return whether a path's file handle is stale: a network file system must be mounted again.

    That happens before a task's start, where the path is psfleet's to mount.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ESTALE
    return f"; {os.strerror(errno.ESTALE)}" in str(error)


def is_device(error: BaseException) -> bool:
    """Return whether it is a broken device's: trying again may help, on another one or after a reset."""
    error = cause(error)
    if "tensorflow" not in sys.modules:
        return False
    from tensorflow import errors

    return isinstance(error, errors.InternalError) and DEVICE.search(str(error)) is not None


def explain(error: BaseException, program_file: Path | None = None) -> str:
    """Describe an error in one line, with the last line of the user's own code that took part in it."""
    error = cause(error)
    message = first_line(error)
    fixes = [fix for words, fix in FIXES.items() if words in message]
    if OUT_OF_RANGE.search(message) and LOOKUP.search(str(error)):
        fixes.append(OUT_OF_TABLE)
    if isinstance(error, ModuleNotFoundError):
        fixes.append(NOT_INSTALLED)
    if isinstance(error, SystemExit):
        fixes.append(ENDS_PYTHON)
    if isinstance(error, KeyboardInterrupt):
        fixes.append(INTERRUPTS)
    summary = ": ".join(
        [type(error).__name__, message.rstrip("."), *fixes] if fixes else [type(error).__name__, message]
    )
    where = user_line(error, program_file)
    if where:
        return f"{where}: {summary}"
    # What fails on a worker knows the name of its operation, but no line.
    node = NODE_IN_MESSAGE.search(str(error))
    return f"{summary} (in the operation {node[1]})" if node and node[1] not in summary else summary


def first_line(error: BaseException) -> str:
    """Return the part of a message that a person wants; AutoGraph puts a traceback before it, TensorFlow one after."""
    text = COLOUR_IN_MESSAGE.sub("", str(error)).strip()
    if of_layer := line_of_layer(text):
        return of_layer
    if text.startswith("in user code:"):
        parts = [part.strip() for part in text.splitlines() if part.strip()]
        stated = [part for part in parts if re.match(r"\w*(Error|Exception|Warning)\b.*:", part)]
        return stated[-1].split(":", 1)[1].strip() if stated else parts[-1]
    lines = [part.strip() for part in text.splitlines() if part.strip()]
    if any(part.endswith("root error(s) found.") for part in lines):
        # "(0) INVALID_ARGUMENT:  what it is"
        roots = [part.partition(":")[2].strip() for part in lines if part.startswith("(0) ")]
        if roots:
            return roots[0]
    if "Graph execution error" in text and len(lines) > 1:
        kept = [part for part in lines if not part.startswith(("Graph execution error", "Detected at", "File ", "<"))]
        lines = [part for part in kept if ":" in part or " " in part] or lines
        lines = lines if not LINE_IN_MESSAGE.search(lines[0]) else lines[-1:]
    return headed(lines) if lines else "no message"


def headed(lines: Sequence[str]) -> str:
    """Return the first line, and after a heading, as where and in which function of `map`, what happened there."""
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def line_of_layer(text: str) -> str:
    """Return what Keras says that went wrong in a layer's call, and in whose; nothing where it says no such thing."""
    lines = [part.strip() for part in text.splitlines() if part.strip()]
    found = [(number, match["called"]) for number, line in enumerate(lines) if (match := LAYER_IN_MESSAGE.match(line))]
    if not found:
        return ""
    number, called = found[-1]
    reasons = list(itertools.takewhile(lambda line: "rguments received by" not in line, lines[number + 1 :]))
    if not reasons:
        return ""
    what = first_line(Exception("\n".join(reasons))) if reasons[0].startswith("in user code:") else headed(reasons)
    return f"{what} (in the call of {called})"
