"""What all tests have: files that processes share, and no collection of garbage that looks at what is imported."""

from __future__ import annotations

import gc

import pytest

from tests.sharing import share_files
from tests.sharing import share_option as pytest_addoption

__all__ = ["pytest_addoption"]
gc.disable()  # an import makes next to no garbage, and there are many, TensorFlow among them


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    share_files(config)
