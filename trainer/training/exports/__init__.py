"""Exports: the model as a SavedModel, whole or shard by shard. `export_changes` beside this applies changes."""
