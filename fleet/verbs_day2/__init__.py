"""The verbs of the second day: who takes part, and what was done."""
