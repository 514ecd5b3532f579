"""python forks.py SOCKET PARENT: the fork server of the tests. What it forks trains in rounds of STEPS_OF_A_ROUND.

Its servers look four times a second whether their run is over.

A call has its step once for each step of a round, and once more for what is left over, and each worker optimises all.
Of few steps that is most of a training: scripts, and trainings in the tests' own process, have rounds of one step, as
large models do; and no graph is optimised, which takes a fifth of a short training. A round of two takes a quarter less
time a step: runs have it, and graphs as TensorFlow optimises them, and so do `make matrix` and tests that ask for it.
Coordinators of supervisors that import TensorFlow, and those on hosts, have eight, as the trainer does.
"""

import os
import sys

from trainer.process.fork_server import WarmParent, listen_at
from trainer.process.warm_start import die_with_parent, warm_up

RUN_POLL_SECONDS = 0.25


def trains_in_rounds_of(steps: int) -> None:
    """Have this process, which has imported TensorFlow, train so."""
    sys.modules["trainer.training.steps.remote"].UNROLLED_STEPS = steps  # type: ignore[attr-defined]
    tensorflow = sys.modules["tensorflow"]
    tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": steps == 1})  # type: ignore[attr-defined]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    sys.path.pop(0)  # the tests': no trainer has them
    server = WarmParent()
    warm_up()
    steps = int(os.environ["STEPS_OF_A_ROUND"])
    sys.modules["trainer.training.steps.remote"].UNROLLED_STEPS = steps  # type: ignore[attr-defined]
    if steps == 1:  # in the child: options make a context of TensorFlow's, and a process that has one can't fork
        os.register_at_fork(after_in_child=lambda: trains_in_rounds_of(1))
    sys.modules["trainer.tasks.server"].RUN_POLL_SECONDS = RUN_POLL_SECONDS  # type: ignore[attr-defined]
    server.run(listen_at(sys.argv[1]))
