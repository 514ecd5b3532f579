"""The page of a run, made from its records."""
