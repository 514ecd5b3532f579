"""`ids` for three workers."""

from ids import Counter, Ids


class CounterOfThree(Counter):
    workers = 3


class Three(Ids):
    """Each of two or three parts has whole batches alone."""

    model = CounterOfThree
    examples = 312
