"""Train a TensorFlow model on parameter servers: one entry point, `python -m trainer`, for every task."""

__version__ = "0.1.0"
