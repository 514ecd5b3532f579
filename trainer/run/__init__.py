"""One run's files: checkpoints, lease, records."""
