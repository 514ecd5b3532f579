"""python forks.py SOCKET PARENT: the fork server of the tests. What it forks trains in rounds of two steps.

Its servers look four times a second whether their run is over.

Of rounds of eight, which the trainer has, each worker optimises a graph that is four times as large: with a tiny model
that is a third of a training. Coordinators of supervisors that import TensorFlow have them, and those on hosts.
"""

import sys

from trainer.process.fork_server import WarmParent, listen_at
from trainer.process.warm_start import die_with_parent, warm_up

STEPS_OF_A_ROUND = 2
RUN_POLL_SECONDS = 0.25

if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    sys.path.pop(0)  # the tests': no trainer has them
    server = WarmParent()
    warm_up()
    sys.modules["trainer.training.steps.remote"].UNROLLED_STEPS = STEPS_OF_A_ROUND  # type: ignore[attr-defined]
    sys.modules["trainer.tasks.server"].RUN_POLL_SECONDS = RUN_POLL_SECONDS  # type: ignore[attr-defined]
    server.run(listen_at(sys.argv[1]))
