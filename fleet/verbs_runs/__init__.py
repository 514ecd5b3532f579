"""The verbs for whole runs, a module each."""
