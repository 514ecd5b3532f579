"""What each kind of task does: coordinator, server, evaluator, or a whole local cluster."""
