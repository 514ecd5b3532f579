"""The tests of the clouds' inventories import their neighbour."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
