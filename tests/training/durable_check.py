"""Train a few steps below the directory that is given, save and export: for those who watch what comes to the disk."""

import json
import os
import sys

from trainer.testing import train

result = train("table:Table", 4, 1, 2, directory=sys.argv[1], partitioner_min_bytes=1024, evaluation="none")
print(json.dumps({"step": result.step, "directory": str(result.directory)}), flush=True)
os._exit(0)
