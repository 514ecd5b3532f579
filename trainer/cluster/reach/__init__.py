"""Which members reach which: the ways between them, how they are tried, and since when one is missing."""
