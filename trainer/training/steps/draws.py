"""What a run draws: from its seed, where it has one."""

from __future__ import annotations

import contextlib
import secrets
import zlib
from collections.abc import Iterator

import tensorflow as tf

from trainer.core.settings.config import Config


def draw_seed(config: Config) -> int:
    return secrets.randbelow(2**31) if config.seed is None else config.seed


def seed_for_step(config: Config, step: int) -> bool:
    """Seed what the program's pipeline draws that goes on at this step, where the run has a seed; returns whether."""
    if config.seed is None or not step:
        return False
    tf.keras.utils.set_random_seed(mixed(config.seed, step))
    return True


@contextlib.contextmanager
def seeded_by(seed: int | None, *numbers: int) -> Iterator[None]:
    """Have what is traced meanwhile draw by these numbers, too; by the run's seed alone where all of them are 0."""
    if seed is not None and any(numbers):
        tf.random.set_seed(mixed(seed, *numbers))
    try:
        yield
    finally:
        if seed is not None and any(numbers):
            tf.random.set_seed(seed)


def mixed(*numbers: int) -> int:
    """Return a seed that follows from these numbers."""
    return zlib.crc32(" ".join(map(str, numbers)).encode()) % 2**31
