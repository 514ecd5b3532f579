"""What coordinators write on each ps for those after them, and the contexts that they leave there."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer.cluster.stale_contexts import close_contexts
from trainer.core.contracts import Tensor
from trainer.training.tf_internals.workers import context_id

FORMAT = 1
OWN = "psfleet"  # the container of the record and of what is set aside, and the record's name


class HandoverRecords:
    """The record of a run on each of its ps: a variable of a name of our own."""

    def __init__(self, run: str, program: str, servers: int, addresses: Collection[str]) -> None:
        """`servers` is the number of ps, `addresses` (host:port) are those of all members."""
        self._run = {"format": FORMAT, "run": run, "program": program}
        self._servers = servers
        self._addresses = addresses
        self.context = context_id()
        """The number of this coordinator's context on the servers."""

    def read(self) -> list[dict[str, Any]]:
        """Return the record of each ps; an empty one where there is none, or one of another format."""
        return [self._read(server) for server in range(self._servers)]

    def write(
        self, server: int, contexts: Iterable[int], offer: Mapping[str, Any], tables: Collection[Mapping[str, Any]]
    ) -> None:
        """Write a ps's record: its contexts, what is offered, and the dynamic tables."""
        record = {**self._run, "contexts": sorted(contexts), "offer": offer, "tables": tables}
        with tf.device(device(server)):
            tf.raw_ops.AssignVariableOp(resource=record_handle(), value=tf.constant(json.dumps(record)))

    def are_whole(self, records: Collection[Mapping[str, Any]]) -> bool:
        """Return whether what was left on the ps is of this run, and what one coordinator left on exactly these."""
        offers = [record.get("offer") or {} for record in records]
        places = [[server, len(records)] for server in range(len(records))]
        batches = {offer.get("batch") for offer in offers}
        same = all(record.items() >= self._run.items() for record in records)
        return same and [offer.get("place") for offer in offers] == places and len(batches) == 1

    def lacking(self, records: Sequence[Mapping[str, Any]]) -> set[int]:
        """Return the ps that are other processes since, where all others have what one coordinator left.

        Empty where none or all are, and where what the others have does not belong together, or lacks what the first
        offer alone has: the coordinator's own values, and how far the data are read.
        """
        offers = [record.get("offer") or {} for record in records]
        there = [server for server, offer in enumerate(offers) if offer]
        batches = {offers[server].get("batch") for server in there}
        places = all(offers[server].get("place") == [server, len(records)] for server in there)
        same = all(records[server].items() >= self._run.items() for server in there)
        whole = same and places and len(batches) == 1 and "input" in offers[there[0]]
        return set(range(len(records))).difference(there) if whole else set()

    def close(self, contexts: set[int]) -> None:
        """Close contexts of earlier coordinators on all members, never this one's."""
        close_contexts(contexts - {self.context}, self._addresses)

    def _read(self, server: int) -> dict[str, Any]:
        with tf.device(device(server)):
            handle = record_handle()
            if not tf.raw_ops.VarIsInitializedOp(resource=handle):
                return {}
            text = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.string).numpy()
        record: dict[str, Any] = json.loads(text)
        return record if record.get("format") == FORMAT else {}


def record_handle() -> Tensor:
    return tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], container=OWN, shared_name=OWN)


def device(server: int) -> str:
    return f"/job:ps/replica:0/task:{server}/device:CPU:0"
