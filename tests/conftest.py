"""No collection of garbage looks at what all the tests have imported: there are many, and TensorFlow is large."""

from __future__ import annotations

import gc

gc.disable()  # an import makes next to no garbage


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()
