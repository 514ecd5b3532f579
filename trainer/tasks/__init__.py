"""What a process is: coordinator, server, evaluator, or a whole local cluster."""
