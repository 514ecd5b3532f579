"""What TensorFlow must find in the environment before it is imported."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator

from trainer.core.failures import explain
from trainer.core.proxies import bypass_proxies

log = logging.getLogger(__name__)
# tf.keras is tf_keras. Programs that `import keras` have Keras 3 beside it (docs/keras3.md).
OF_KERAS = {"TF_USE_LEGACY_KERAS": "1", "KERAS_BACKEND": "tensorflow"}
ENVIRONMENT = {
    **OF_KERAS,
    # "false" makes a call to a dead member hang.
    "GRPC_FAIL_FAST": "use_caller",
    "TF_CPP_MIN_LOG_LEVEL": "1",
    # Else the first process that uses a GPU takes all of its memory.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    # pyarrow, which pandas imports, would start a thread: then no process can be forked from the one that imported it.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
# Of a ps: large pages for its tables, so that a row is found with fewer reads of memory (docs/large-tables.md). The C
# library reads it when a process begins, so that the process that starts a ps has to set it.
PS_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
NO_GPU = "-1"  # CUDA_VISIBLE_DEVICES of a task that is to use none
# Of each task under every manager, also of what imports TensorFlow before the trainer does.
TASK_ENVIRONMENT = {name: ENVIRONMENT[name] for name in ("TF_USE_LEGACY_KERAS", "GRPC_FAIL_FAST")}
# What TensorFlow warns of in every training: it traces its own function again for each checkpoint, and `run` is called
# outside `schedule` wherever a step is traced and a model with metrics is built. A worker's one GPU has its own data.
EXPECTED = (
    "MultiDeviceSaver.save",
    "method is invoked without using `ClusterCoordinator.schedule`",
    "1 GPUs are allocated per worker",
)


def task_environment(job: str) -> dict[str, str]:
    """Return what a task of this job must have in its environment from its start."""
    return TASK_ENVIRONMENT | (PS_ENVIRONMENT if job == "ps" else {})


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import TensorFlow, also where the disk is full.

    absl, which it imports, asks for the name of the directory for temporary files. Python tries to write there first.
    """
    before = tempfile.tempdir
    tempfile.tempdir = before or os.environ.get("TMPDIR") or "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = before


def prepare_tensorflow() -> None:
    """Set what is not set; raises ImportError when TensorFlow is imported already, with Keras 3."""
    bypass_proxies()
    for name, value in OF_KERAS.items():
        given = os.environ.get(name, value)
        if given != value and not (value == "1" and given.lower() == "true"):  # as TensorFlow reads a switch
            log.warning("%s=%s is set, which training can't use: it counts as %s", name, given, value)
            os.environ[name] = value
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("tensorflow").addFilter(is_news)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and not tensorflow.keras.Model.__module__.startswith("tf_keras."):
        raise ImportError(
            "TensorFlow was imported with Keras 3 as tf.keras, which is tf_keras here; a program of Keras 3 says "
            "`import keras`. In a notebook: import trainer.testing before TensorFlow and Keras. In a unit test: do so "
            "in conftest.py. Or set TF_USE_LEGACY_KERAS=1 before Python starts"
        )


def is_news(record: logging.LogRecord) -> bool:
    """Drop TensorFlow's warnings of what is expected, and say its errors in short: each has the whole text twice."""
    if errors := [one for one in record.args or () if isinstance(one, Exception)]:
        record.msg, record.args = record.getMessage().partition(repr(errors[0]))[0] + explain(errors[0]), ()
    return not any(known in record.getMessage() for known in EXPECTED)
