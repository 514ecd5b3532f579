"""`three`, in a process that finds the names of drained tasks where the test puts them."""

import os
from pathlib import Path

from three import Three as Three

from trainer.cluster.members import draining

draining.DRAINED = Path(os.environ["DRAINED_TASKS"])
