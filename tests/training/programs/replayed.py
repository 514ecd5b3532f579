"""`matrix`, whose updates are written down on the ps, and done again one by one in the coordinator at the end.

Its line of JSON says how many there were, and how far what they give is from what the ps hold.
"""

import json
from functools import partial

import tensorflow as tf
from matrix import Matrix

from tests.training.replay import Recorded, differing
from trainer.training.loop import custom_loop, epochs
from trainer.training.steps import call_accounts

RECORDED = Recorded()
# No optimization of graphs may round otherwise in a replay than before.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
call_accounts.AtomicUpdates = partial(call_accounts.AtomicUpdates, record=RECORDED)
# The weights stay what the updates have made of them: at the end averages would be taken for them.
custom_loop.finalise = epochs.finalise = lambda model: None


class Replay(tf.keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        count, found = RECORDED.replay()
        print(json.dumps({"updates": count, "variables": len(found), "differing": differing(found)}), flush=True)


class Replayed(Matrix):
    def callbacks(self):
        return [Replay()]
