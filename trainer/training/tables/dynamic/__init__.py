"""Tables without a vocabulary: rows by key, given on the ps as keys come (docs/dynamic-tables.md)."""
