"""Log lines for humans, on standard error."""

from __future__ import annotations

import logging
import sys


def set_up_logging(journal: bool) -> None:
    """Log to standard error; with times unless the journal adds them."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(levelshort)s%(message)s" if journal else "%(asctime)s %(levelshort)s%(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(shorten_level)
    for noisy in ("absl", "tensorflow", "h5py"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def shorten_level(record: logging.LogRecord) -> bool:
    """Show the level only where it is news."""
    record.levelshort = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
    return True
