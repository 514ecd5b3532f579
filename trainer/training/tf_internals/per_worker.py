"""What lies on each worker, such as a copy of a lookup table: TensorFlow makes it for the workers that it has then."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from trainer.core.contracts import Coordinator

METHODS = ("_create_per_worker_resources", "_create_per_worker_variables")


class PerWorkerResources:
    """Remembers what a ClusterCoordinator has on each worker, as long as it is used."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._made: list[weakref.ref[Any]] = []
        for name in METHODS:
            setattr(coordinator, name, self._remembering(getattr(coordinator, name)))

    def _remembering(self, create: Callable[..., Any]) -> Callable[..., Any]:
        def created(*given: object, **named: object) -> Any:
            made = create(*given, **named)
            self._made.append(weakref.ref(made))
            return made

        return created

    def give(self, worker: Any) -> None:
        """Have a worker that joins make its own of all that the others have."""
        self._made = [made for made in self._made if made() is not None]
        for made in self._made:
            values: Any = made()
            if values is not None:
                extend(values, worker)


def extend(values: Any, worker: Any) -> None:
    """Give one of TensorFlow's PerWorkerValues a value on one more worker, also in the calls that are queued already.

    A value that its worker makes again after a loss keeps what makes it.
    """
    first = values._values[0]
    is_variable = type(first).__name__ == "RemoteVariable"
    create = worker.create_variable_resource if is_variable else worker.create_resource
    own = create(first._closure._function, args=first._closure._args, kwargs=first._closure._kwargs)
    own._type_spec = first._type_spec
    values._values = (*values._values, own)
