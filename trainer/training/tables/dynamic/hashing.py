"""Numbers that follow from a key alone: the ps that has its row, and the row's first values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Tensor
from trainer.core.failures import UserError

# The constants of splitmix64.
GOLDEN, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
OWNERS = 0x5851F42D4C957F2D
BITS = 24  # of a number between 0 and 1
FirstValues = Callable[[Any], Any]


def keys_of(ids: Tensor) -> Tensor:
    """Return the keys (int64) of ids: numbers are their own, and of a text it is a hash of 63 bits, always the same."""
    return tf.strings.to_hash_bucket_fast(ids, tf.int64.max) if ids.dtype == tf.string else tf.cast(ids, tf.int64)


def checked(ids: Any, table: str, masks: bool) -> Tensor:
    """Return ids as a tensor; raises UserError for what is none: floats have too few digits for large ids.

    With `masks` Keras compares them with 0.
    """
    ids = tf.convert_to_tensor(ids)
    if not (ids.dtype.is_integer or ids.dtype == tf.string):
        raise UserError(
            f"dynamic_tables: {table}: its ids are {ids.dtype.name}, expected whole numbers or texts: give the model's "
            "Input dtype='int64'"
        )
    if masks and ids.dtype == tf.string:
        raise UserError(
            f"dynamic_tables: {table}: its layer has mask_zero and its ids are texts, of which none is 0: leave "
            "mask_zero out, or make numbers of the texts"
        )
    return ids


def salt_of(name: str) -> int:
    """Return a number of 63 bits by which the first values of one table differ from another's."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def mixed(numbers: Tensor, salt: int) -> Tensor:
    """Return numbers of 63 bits that look drawn, and depend on these (int64) and the salt alone."""
    bits = tf.bitcast(numbers, tf.uint64) + GOLDEN ^ salt  # unsigned ones are shifted without their sign
    bits = (bits ^ shifted(bits, 30)) * FIRST_FACTOR
    bits = (bits ^ shifted(bits, 27)) * SECOND_FACTOR
    return tf.bitcast((bits ^ shifted(bits, 31)) & tf.int64.max, tf.int64)


def shifted(numbers: Tensor, places: int) -> Tensor:
    return tf.bitwise.right_shift(numbers, tf.constant(places, numbers.dtype))


def owner_of(keys: Tensor, servers: int) -> Tensor:
    """Return the number of the ps that has each key's row (int32), of so many.

    It must stay as it is: on as many ps each one reads what it wrote, and a row with another owner is never read.
    """
    return tf.cast(mixed(keys, OWNERS) % servers, tf.int32)


def drawn(keys: Tensor, width: int, salt: int) -> Tensor:
    """Return a number of 63 bits for each key and column."""
    columns = tf.range(1, width + 1, dtype=tf.int64) * (GOLDEN - 2**64)
    return mixed(tf.expand_dims(mixed(keys, salt), 1) + columns, salt)


def fraction(numbers: Tensor) -> Tensor:
    """Return what the last bits of numbers say, from 0 to less than 1."""
    return tf.cast(numbers & ((1 << BITS) - 1), tf.float32) / float(1 << BITS)


def uniform(width: int, salt: int, least: float, most: float) -> FirstValues:
    """Return what gives keys their first values, evenly spread between two numbers."""

    def values(keys: Tensor) -> Tensor:
        return least + fraction(drawn(keys, width, salt)) * (most - least)

    return values


def normal(width: int, salt: int, mean: float, deviation: float) -> FirstValues:
    """Return what gives keys their first values, of a normal distribution (Box and Muller)."""

    def values(keys: Tensor) -> Tensor:
        bits = drawn(keys, width, salt)
        first, second = fraction(bits), fraction(shifted(bits, BITS))
        length = tf.sqrt(-2.0 * tf.math.log(first + 2.0 ** -(BITS + 1)))
        return mean + deviation * length * tf.cos(2.0 * 3.14159265358979 * second)

    return values


def constant(width: int, value: float) -> FirstValues:
    """Return what gives every key the same first values."""
    return lambda keys: tf.fill([tf.size(keys), width], value)
