"""psfleet's verbs for `fab`. Your own go below: `namespace.add_task(...)`."""

from fleet.program import namespace

__all__ = ["namespace"]
