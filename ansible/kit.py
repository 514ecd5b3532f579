"""Lets Ansible's plugins import psfleet's packages, which lie beside `ansible` in a checkout.

A plugin runs this file first, since Ansible's plugins can't import one another. In an installed package it adds nothing
that matters.
"""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)
