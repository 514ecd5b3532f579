"""Compute as the proof of GPUs does, on the processor: right, and with what is wrong; print what is said of each."""

import json
import os

import numpy as np
import tensorflow as tf

from trainer import gpu_check

multiply, convolve = gpu_check.multiply, gpu_check.convolve


def one_wrong_number():
    spoil = lambda a, b: tf.tensor_scatter_nd_add(tf.matmul(a, b), [[7, 9]], [1.0])  # noqa: E731
    return tf.function(spoil, jit_compile=True)


def one_halved(*arguments):
    halved = np.ones([2, 28, 28, 16], np.float32)
    halved[1, 9, 9, 3] = 0.5
    return convolve(*arguments) * halved


def no_number(*arguments):
    return convolve(*arguments) * float("nan")


def without_code(*arguments):
    """As cuDNN speaks of a GPU that it has no code for."""
    raise tf.errors.InternalError(None, None, "No DNN in stream executor.")


CASES = {
    "right": (multiply, convolve),
    "one wrong number": (one_wrong_number, convolve),
    "one halved": (multiply, one_halved),
    "no number": (multiply, no_number),
    "without code": (multiply, without_code),
}
found = {}
for name, functions in CASES.items():
    gpu_check.multiply, gpu_check.convolve = functions
    found[name] = gpu_check.compute("CPU")
print(json.dumps({"found": found}), flush=True)
os._exit(0)
