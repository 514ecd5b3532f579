"""How text is printed: tables, the terminal, `--json`."""
