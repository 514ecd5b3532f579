"""The elements of a run's page: sections, figures, tables, and how values are written."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

MAX_ROWS = 1000  # of a table
NUMBERS = ("step", "took", "size", "steps lost")  # columns that are set to the right


def escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def with_code(text: str) -> str:
    """Escape a text; what stands between backquotes is code."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def moment(at: float | None) -> str:
    """Return a time as the page shows it where no script runs; the script writes the reader's own time."""
    return "" if at is None else datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def thousands(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def clock(at: float | None) -> str:
    if at is None:
        return ""
    when = datetime.fromtimestamp(at, timezone.utc)
    return f'<time datetime="{when.isoformat(timespec="seconds")}">{escape(moment(at))}</time>'


def figure(kind: str, title: str, message: str, name: str = "") -> str:
    """Return a figure that the script draws; its message is what it says in words."""
    label = escape(f"{title}. {message}")
    return (
        f'<figure class="{kind}"><h3>{escape(title)}</h3>'
        f'<div class="chart" role="img" data-figure="{kind}" data-name="{escape(name)}" aria-label="{label}">'
        f"</div><figcaption>{escape(message)}</figcaption></figure>"
    )


def section(title: str, inside: str, name: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{inside}</section>'


def advised(texts: Sequence[str]) -> str:
    """Return the section that says what to do next; nothing where there is nothing to do."""
    if not texts:
        return ""
    items = "".join(f"<li>{with_code(text)}</li>" for text in texts)
    title = '<h2 id="next">What to do next</h2>'
    return f'<section class="advice" aria-labelledby="next">{title}<ul>{items}</ul></section>'


def bars(names: Sequence[str], rows: Iterable[tuple[str, str, float, str]], kind: str = "") -> str:
    """Return a table with a bar in each row: name, value, share of the bar, and what the share says."""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="number">{escape(value)}</td>'
        f'<td class="bar"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="{escape("kind-" + name) if kind else "plain"}" width="{100 * share:.2f}" height="10"/></svg>'
        f"<span>{escape(more)}</span></td></tr>"
        for name, value, share, more in rows
    )
    head = "".join(
        f'<th scope="col"{" class=number" if place == 1 else ""}>{escape(name)}</th>'
        for place, name in enumerate(names)
    )
    return scrollable(f'<table class="bars"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def scrollable(table: str) -> str:
    """Return a table that may be wider than its reader's screen: it can be scrolled with the keyboard as well."""
    return f'<div class="table" tabindex="0">{table}</div>'


def details(title: str, names: Sequence[str], rows: str, opened: bool = False, kind: str = "") -> str:
    head = "".join(f'<th scope="col"{" class=number" if name in NUMBERS else ""}>{escape(name)}</th>' for name in names)
    return (
        f'<details{" open" if opened else ""}><summary>{escape(title)}</summary><div class="table" tabindex="0">'
        f"<table{f' class={kind}' if kind else ''}>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )
