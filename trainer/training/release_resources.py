"""Let go of what a generation left on the servers, so that the next one can make its strategy in this process.

A strategy's constructor waits, with Python's lock, until all is done that TensorFlow's default executor has asked of
the servers. What this process lets go of, it asks them to free in that way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import Any

import tensorflow as tf

from trainer.training.tf_internals.executors import default_executor, make_executor, on_executor

RELEASE_SECONDS = 0.5
AT_ONCE_SECONDS = 0.05  # what a worker needs that is not busy
POSTED_SECONDS = 0.1  # until the default executor has what another thread hands to it


@dataclasses.dataclass
class Iterators:
    """The iterators of a generation: a handle on each worker, and types and shapes of the tensors that they give.

    `users` are the threads that make and use them, one for each worker.
    """

    handles: list[Any]
    types: list[tf.DType]
    shapes: list[tf.TensorShape]
    users: list[threading.Thread] = dataclasses.field(default_factory=list)

    @property
    def elements(self) -> list[tuple[tf.DType, tf.TensorShape]]:
        return list(zip(self.types, self.shapes, strict=True))

    def are_unused(self, seconds: float) -> bool:
        """Return whether the threads, which were asked to end, have done so in so many seconds.

        A strategy for other members frees the devices that such a thread uses: the process dies of SIGSEGV.
        """
        deadline = time.monotonic() + seconds
        for thread in self.users:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self.users)


def release_iterators(iterators: Iterators) -> None:
    """Have the workers free their iterators; half a second is given to it, and less where they have begun to.

    tf.data's thread that tunes an iterator may miss that it is cancelled: it is woken before the flag is set that it
    looks at, and sleeps on, for up to a minute. The iterator's end waits for that. A worker that frees an iterator by
    its handle holds a lock meanwhile, and does nothing else for any generation. So each handle gets an iterator of
    nothing first: the old one then ends in a thread of its own on the worker.
    """
    # These types have no empty iterator: only the handle is let go of.
    replaces = not any(dtype in (tf.variant, tf.resource) for dtype in iterators.types)
    deadline = time.monotonic() + RELEASE_SECONDS
    # One for each, or they would wait for one another. The next strategy's constructor waits for a thread's.
    own, before = [make_executor() for _ in iterators.handles], default_executor()
    if replaces:
        for one, handle in zip(own, iterators.handles, strict=True):
            with on_executor(one, before), contextlib.suppress(tf.errors.OpError), tf.device(handle.device):
                tf.raw_ops.MakeIterator(dataset=make_nothing(iterators), iterator=handle)
            del handle
    ended = replaces and have_ended(own, AT_ONCE_SECONDS)
    while replaces and not ended and not are_empty(iterators, deadline) and time.monotonic() < deadline:
        time.sleep(AT_ONCE_SECONDS)
    for one in own:
        with on_executor(one, before):
            del iterators.handles[0]  # which asks the worker to free it
    if ended or not replaces:
        have_ended(own, deadline - time.monotonic())


def are_empty(iterators: Iterators, deadline: float) -> bool:
    """Return whether each worker has an iterator of nothing by now, or is gone."""
    own, before = [make_executor() for _ in iterators.handles], default_executor()
    empty = []
    for one, handle in zip(own, iterators.handles, strict=True):
        with on_executor(one, before), contextlib.suppress(tf.errors.OpError), tf.device(handle.device):
            tf.raw_ops.IteratorGetNext(iterator=handle, output_types=iterators.types, output_shapes=iterators.shapes)

    def wait() -> None:
        for one in own:
            try:
                one.wait()
            except tf.errors.OpError:  # the end of what is empty; or its worker has ended
                empty.append(one)

    has_ended(threading.Thread(target=wait, name="iterators", daemon=True), deadline - time.monotonic())
    return len(empty) == len(own)


def have_ended(executors: list[Any], seconds: float) -> bool:
    """Return whether all that was asked for through these has been done, or has failed, in so many seconds."""

    def wait() -> None:
        for one in executors:
            with contextlib.suppress(tf.errors.OpError):
                one.wait()

    return has_ended(threading.Thread(target=wait, name="iterators", daemon=True), seconds)


def has_ended(thread: threading.Thread, seconds: float) -> bool:
    """Start a thread; return whether it ends in so many seconds. It goes on in any case."""
    thread.start()
    thread.join(max(0.0, seconds))
    return not thread.is_alive()


def make_nothing(like: Iterators) -> Any:
    """Return a dataset of such elements that has none."""
    one = [tf.zeros([size or 0 for size in shape] if shape.rank else [], dtype) for dtype, shape in like.elements]
    dataset = tf.raw_ops.TensorDataset(components=one, output_shapes=like.shapes)
    return tf.raw_ops.TakeDataset(
        input_dataset=dataset, count=tf.constant(0, tf.int64), output_types=like.types, output_shapes=like.shapes
    )


def freed(seconds: float) -> bool:
    """Return whether the servers have freed what this process let go of, in so many seconds.

    Nothing waits for that, not even the next strategy's constructor, when one of them was found to be gone.
    """

    def wait() -> None:
        time.sleep(POSTED_SECONDS)
        with contextlib.suppress(tf.errors.OpError):
            default_executor().wait()

    return has_ended(threading.Thread(target=wait, name="freeing", daemon=True), seconds)
