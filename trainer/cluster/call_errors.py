"""Errors of calls that are the program's, though workers report them."""

from __future__ import annotations

from trainer.core.failures import UserError, explain


def killed_by_call(tasks: list[str], steps: int, step: int | None) -> UserError:
    """Return the error that a call of so many steps is, after this step, which killed worker after worker."""
    return UserError(
        f"the same call of {steps} steps, after step {step}, ended the processes of "
        f"{', '.join(tasks)} one after the other. Their journals say why (fab logs --task {tasks[-1]}): too little "
        "memory for a batch, or an operation that fails a check"
    )


def failed_alike(error: Exception) -> UserError:
    """Return the error that the program has, where every worker reports it and none has ended."""
    return UserError(
        f"every worker fails in the same way, again and again, and none of them has ended: {explain(error)}. "
        "So the program or its data are at fault, not a machine. Where it names a device: make in build_model what a "
        "step or a dataset uses. A variable, table, optimizer or generator that is made elsewhere lies in the "
        "coordinator, where workers can't reach it (docs/programs.md)"
    )
