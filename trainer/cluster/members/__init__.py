"""The members of a run: those that a generation begins with, which live, and what becomes of them."""
