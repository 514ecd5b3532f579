"""As `rated`, ten batches a second from each worker: time enough to be stopped early."""

from rated import Rated
from tensorflow.python.data.experimental.ops import testing


class Searched(Rated):
    def train_dataset(self, context):
        return super().train_dataset(context).apply(testing.sleep(100_000))
