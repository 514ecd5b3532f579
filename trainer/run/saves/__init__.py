"""Saving what is trained, and restoring it; `run/catalogue` says which checkpoints count."""
