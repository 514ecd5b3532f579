"""What each kind of task does: coordinator, server, evaluator, or a whole local cluster.

Modules that need TensorFlow are imported in functions, where a task begins with it. A supervisor forks its children
with TensorFlow imported, some tasks wait without its memory, and `status` and the proofs of settings need none of it.
"""
