"""Never builds its model."""

import time


class Stuck:
    def build_model(self):
        time.sleep(600)

    def train_dataset(self, context):
        raise NotImplementedError

    def eval_dataset(self, context):
        raise NotImplementedError
