"""Which changes of the members end a generation, and whether they may do so now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.core.task_id import is_worker
from trainer.training.loop.joining import Joining

if TYPE_CHECKING:
    from trainer.cluster.members.membership import Membership
    from trainer.run.saves.checkpoints import Checkpoints


class MemberChanges:
    """The members that are lost, that leave and that have returned, as the last look found them."""

    def __init__(
        self, members: Membership | None, storage: Checkpoints, joining: Joining | None = None, *, elastic: bool
    ) -> None:
        """`elastic` says that members which return are taken in; without `members` nothing changes."""
        self._members = members
        self._storage = storage
        self._elastic = elastic
        self._joining = joining
        self.lost: list[str] = []
        self.leaving: list[str] = []
        self.returned: list[str] = []

    def poll(self, is_recovering: bool) -> None:
        """Find the ps that are lost, and those that leave and that can be let go: after a save, which must not fail.

        So are drained workers, where others can't read their data before. Workers join meanwhile, where they can.
        `is_recovering` says that TensorFlow is taking in a worker.
        """
        if self._members is None:
            return
        self.lost = self._members.lost_ps()
        must_stay = is_recovering or self._storage.trouble() is not None
        self.leaving = [] if must_stay else self._members.leaving_ps()
        if self._joining is not None:
            self._joining.poll(is_recovering)
            if self._elastic and not must_stay:
                self.leaving += self._joining.leaving

    def look_for_returned(self, is_recovering: bool) -> None:
        """Find the members that can be taken in now: not while TensorFlow takes in another, or saves fail.

        Members that were found before stay found, until `put_off`.
        """
        if self.returned or self._members is None or not self._elastic or is_recovering:
            return
        if self._storage.trouble() is None and self._storage.settle(0):
            back, workers_join = self._members.returned(), self._joining is not None and self._joining.is_possible
            self.returned = [task for task in back if not (workers_join and is_worker(task))]

    def put_off(self) -> None:
        """Take in no member for now: the save before it has failed."""
        self.returned = []

    @property
    def are_wanted(self) -> bool:
        """Whether the generation is to end after a save, so that its members change."""
        return bool(self.leaving or self.returned)

    @property
    def message(self) -> str:
        """Why the generation ends."""
        if self.leaving:
            return f"{', '.join(self.leaving)} leaves, and the checkpoint is saved"
        return f"{', '.join(self.returned)} answers again"
