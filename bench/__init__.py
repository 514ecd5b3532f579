"""Measurements of psfleet, each a command that prints tables."""
