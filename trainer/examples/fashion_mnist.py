"""Fashion-MNIST: pictures of clothes, from the four files that its authors publish.

The files lie in <DATA_DIR>/fashion_mnist on a path that every machine mounts, packed (.gz) or not. Each worker reads
them itself, and keeps its own part in memory.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path

import tensorflow as tf

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
IMAGES = 0x00000803  # an IDX file begins with the type of its numbers (8: bytes) and how many dimensions it has (3)
LABELS = 0x00000801
SIDE = 28
BATCH = 64


def data_directory() -> Path:
    """Return where the files lie; the environment variable DATA_DIR says which directory holds the data."""
    return Path(os.environ.get("DATA_DIR", "/srv/trainer/data")) / "fashion_mnist"


def find(part: str) -> list[Path]:
    """Return the files of images and labels of "train" or "test"; raises FileNotFoundError that says which lack."""
    directory = data_directory()
    names = [name for names in FILES.values() for name in names]
    found = {name: path for name in names for path in (directory / f"{name}.gz", directory / name) if path.exists()}
    missing = [f"{name}.gz" for name in names if name not in found]
    if missing:
        raise FileNotFoundError(
            f"{directory} lacks {', '.join(missing)}: put the four files of Fashion-MNIST there (packed or not), "
            "or set DATA_DIR to the directory that holds fashion_mnist/"
        )
    return [found[name] for name in FILES[part]]


def check(path: Path, magic: int, header: int, record: int) -> int:
    """Return how many records of so many bytes an IDX file holds; raises ValueError that names a file which is none."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(header)
            length = sum(len(block) for block in iter(lambda: file.read(1 << 20), b""))
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} can't be unpacked: {error}") from error
    if len(start) < header:
        raise ValueError(f"{path} is not an IDX file: it has {len(start)} bytes, and its header alone takes {header}")
    found, count, *sides = struct.unpack(f">{header // 4}I", start)
    if found != magic:
        raise ValueError(f"{path} begins with {found:#010x}, not with {magic:#010x}: it is another kind of file")
    if sides not in ([], [SIDE, SIDE]):
        raise ValueError(f"{path} holds images of {sides[0]} by {sides[1]} pixels, not of {SIDE} by {SIDE}")
    if length != count * record:
        raise ValueError(
            f"{path} is cut off or too long: it announces {count} records of {record} bytes and holds {length} bytes"
        )
    return count


def read(part: str) -> tf.data.Dataset:
    """Return the pictures (bytes, row by row) and labels (one byte) of "train" or "test", not read yet."""
    images, labels = find(part)
    counts = check(images, IMAGES, header=16, record=SIDE * SIDE), check(labels, LABELS, header=8, record=1)
    if counts[0] != counts[1]:
        raise ValueError(f"{images} holds {counts[0]} images, but {labels} holds {counts[1]} labels")
    return tf.data.Dataset.zip((records(images, header=16, record=SIDE * SIDE), records(labels, header=8, record=1)))


def records(path: Path, header: int, record: int) -> tf.data.Dataset:
    packed = "GZIP" if path.suffix == ".gz" else ""
    return tf.data.FixedLengthRecordDataset(str(path), record, header_bytes=header, compression_type=packed)


def decode(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Turn a batch of bytes into images (batch, 28, 28) and labels (batch,) of 0 to 255."""
    images = tf.reshape(tf.io.decode_raw(images, tf.uint8), (-1, SIDE, SIDE))
    return images, tf.reshape(tf.io.decode_raw(labels, tf.uint8), (-1,))


class FashionMnist:
    """A small convolutional network that tells ten kinds of clothes apart."""

    def build_model(self) -> tf.keras.Model:
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((SIDE, SIDE)),
                tf.keras.layers.Rescaling(1 / 255),  # part of the model, so that the served model takes raw pixels
                tf.keras.layers.Reshape((SIDE, SIDE, 1)),
                tf.keras.layers.Conv2D(32, 3, activation="relu"),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Conv2D(64, 3, activation="relu"),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dropout(0.4),
                tf.keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=tf.keras.optimizers.Adam(1e-3),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        # Each worker keeps its own part, in an order of its own; the first pass fills the cache.
        dataset = read("train").shard(context.num_input_pipelines, context.input_pipeline_id).cache()
        return dataset.shuffle(10_000).repeat().batch(BATCH).map(decode).prefetch(tf.data.AUTOTUNE)

    def eval_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = read("test").shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(BATCH).map(decode)
