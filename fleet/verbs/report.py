"""`fab report`: a run's page, one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fleet.actions.console import Console
from fleet.errors import OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.planning import decision
from fleet.site.schema.formats import control_path
from fleet.site.schema.problems import show


def make_report(
    cluster: Cluster,
    console: Console,
    runs: Sequence[str],
    out: Path | None = None,
    then: Callable[[str], object] | None = None,
) -> None:
    """Write the page of the chosen run, or of these side by side, to a file here; `then` is given its URI."""
    for run in runs:
        decision.check_names(run, None)  # a wrong name is said before any host is asked
    if out is not None:
        _reject_place(out)
    made = cluster.make_report(runs)
    place = out or Path(f"report-{'-'.join(made['runs'][:3])}.html")
    try:
        place.write_text(made["html"], encoding="utf-8")
    except OSError as error:
        raise OperatorMistake(f"{place} can't be written ({error.strerror}): name another file with --out") from error
    size = place.stat().st_size
    record = {"runs": made["runs"], "report": str(place.resolve()), "size": size}
    console.answer("report", record, f"{place}: {' and '.join(made['runs'])}, {size / 1e6:.1f} MB, needs no server")
    if then is not None:
        then(place.resolve().as_uri())


def _reject_place(out: Path) -> None:
    """Raise OperatorMistake where no file can be written, before any host is asked."""
    try:
        control_path(str(out))
        if out.is_dir() or not out.parent.is_dir():
            raise ValueError(f"it is a directory, or {out.parent} is none")
    except ValueError as error:
        raise OperatorMistake(
            f"--out is {show(str(out))}: {error}; expected a file to write, such as --out report.html"
        ) from error
