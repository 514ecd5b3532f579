"""Markdown tables, printed row by row as the figures come."""

from __future__ import annotations


def print_row(*cells: str, head: bool = False) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)
    if head:
        print("|" + "---|" * len(cells), flush=True)
