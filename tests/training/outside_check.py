"""Build programs that use what was made before the strategy, on servers in this process; print what becomes of each."""

import json
import logging
import sys

from trainer import testing  # before TensorFlow: it chooses the Keras

import outside  # isort: skip - as a run imports its program, before there is a strategy

from trainer.core.failures import UserError, explain
from trainer.core.program import program_file
from trainer.core.settings.config import Config
from trainer.tasks.in_process import start_cluster
from trainer.training.data import large_arrays
from trainer.training.measures.outputs import fetch_numbers
from trainer.training.steps.remote import RemoteStepRunner
from trainer.training.strategies import make_strategy

logging.disable(logging.INFO)
WORKERS, STEPS = 2, 4
found = {}


class Keep(logging.Handler):
    def emit(self, record):
        found.setdefault(f"warned of {name}", record.getMessage())


for warner in ("forgotten", "keras.keras2", "keras.keras3.model", "data.large_arrays", "data.python_calls"):
    logging.getLogger(f"trainer.training.{warner}").addHandler(Keep())
programs = {name: getattr(outside, name)() for name in sys.argv[1:]}
config = Config.from_dict({"program": "outside:Plain", "run": "test", "shared_dir": "/tmp", "steps": STEPS})
strategy = make_strategy(config, start_cluster("parameter_server", WORKERS, 2))
for name, program in programs.items():
    large_arrays.LIMIT_BYTES = 10_000 if name.startswith("Large") else 1 << 31
    large_arrays.COPIED_BYTES = 10_000 if name.startswith("Copied") else 1 << 31
    try:
        runner = RemoteStepRunner(config, program, strategy, WORKERS)
    except UserError as error:
        found[name] = str(error)
        continue
    except Exception as error:
        found[name] = explain(error, program_file(program))
        continue
    finally:
        getattr(program, "undo", lambda on: None)(False)
    calls = [runner.call(1) for _ in range(STEPS)]
    runner.join()
    found[name] = [fetch_numbers(call.outputs) for call in calls]
    if isinstance(program, outside.OwnOptimizer):
        found[f"weights of {name}"] = program.model.weights[0].numpy().ravel().tolist()
    if hasattr(program, "counted"):
        found[f"counted of {name}"] = float(program.counted())
    found[f"places of {name}"] = getattr(program, "places", [])
    runner.close()  # and with it what this strategy's calls need
    strategy = make_strategy(config, start_cluster("parameter_server", WORKERS, 2))
print(json.dumps(found), flush=True)
testing.kept_signals  # noqa: B018 - the import above is for what it does
