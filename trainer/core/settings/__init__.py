"""The run settings: how one is declared, which values are right, and which of them go together."""
