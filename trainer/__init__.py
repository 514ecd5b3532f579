"""Train a TensorFlow model on parameter servers: one entry point, `python -m trainer`, for every task.

To read what a run does, in its order: `__main__` finds the task, and `process/supervisor` forks it with TensorFlow
imported. `tasks/coordinator` takes the run's lease, and `tasks/training` trains one generation after the other, which
`tasks/generation` wires. `training/loop/controller` gives calls of steps to the workers (`training/steps`), and does
beside them what is due. A ps or worker is `tasks/server`. When one is lost, `cluster` says so.
"""

__version__ = "0.1.0"
