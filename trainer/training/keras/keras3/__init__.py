"""Models of Keras 3 on parameter servers (docs/keras3.md).

Its `fit` can't train there, and its variables and optimizers know of one process alone. So its own `train_step` runs in
the packed calls, with four changes: what a step writes over what it has read is added instead, tables are looked up
where they lie, the shards of a split variable are trained as variables of their own, and random numbers without a seed
are drawn. `keras` is imported where a model of it is at hand: other programs need not pay for it.
"""
