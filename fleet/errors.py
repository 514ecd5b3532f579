"""Why a verb stops. Each carries data; fleet/command_line alone turns them into a message and an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.output.terminal import set_off


class FleetError(Exception):
    """A verb can't go on, or can't say that all is well."""

    code = 1


class OperatorMistake(FleetError):
    """A value is wrong: the message says which, what was expected and how to fix it."""

    code = 2


class OthersAtWork(OperatorMistake):
    """Another verb or run of `site.yml` is at work on the cluster."""


@dataclass(frozen=True)
class Trouble:
    """What is wrong with one task, with the last lines of its journal."""

    task: str
    host: str
    what: str
    journal: Sequence[str] = ()

    def __str__(self) -> str:
        lines = [f"{self.task} on {self.host}: {set_off(self.what)}"]
        if self.journal:
            lines.append(f"  the last lines of its journal (more: fab logs --task {self.task}):")
            lines += [f"  | {line}" for line in self.journal]
        return "\n".join(lines)


class ClusterTrouble(FleetError):
    """One or more tasks aren't as they should be."""

    code = 1

    def __init__(self, message: str, troubles: Sequence[Trouble] = ()) -> None:
        super().__init__("\n".join([message, *map(str, troubles)] if message else map(str, troubles)))
        self.troubles = tuple(troubles)


class HostsUnreachable(FleetError):
    """One or more hosts could not be asked; the others' results were shown."""

    code = 4

    def __init__(self, reasons: Mapping[str, str], rest: str = "") -> None:
        lines = [f"{host} is unreachable: {reason}" for host, reason in reasons.items()]
        super().__init__("\n".join([*lines, rest] if rest else lines))
        self.reasons, self.rest = dict(reasons), rest


def first_line(error: Exception) -> str:
    """The first line of an error, which may quote a whole file."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
