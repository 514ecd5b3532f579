"""`fab validate`: everything that can be said of an inventory without asking a host."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fleet.errors import OperatorMistake
from fleet.site.inventory import describe, find_problems, list_notes
from fleet.site.reader import read_source
from fleet.site.schema.problems import Problem, describe_problems
from fleet.verbs import Desk


def validate(
    desk: Desk,
    given: str | None = None,
    as_json: bool = False,
    ask_vault_pass: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Say whether an inventory is right. With `as_json`, all problems; else the first ten.

    Raises OperatorMistake when it is not; its message is empty where JSON said it.
    """
    source, problems, notes, tasks = None, [], [], 0
    try:
        read = read_source(given, environment, True, ask_vault_pass)
        source = read.name
        problems = find_problems(read)
        if not problems:
            inventory = describe(read)
            notes, tasks = list_notes(inventory), len(inventory.tasks)
    except OperatorMistake as error:
        problems = [Problem(str(error))]
    if as_json:
        shown = {
            "inventory": source,
            "right": not problems,
            "problems": [problem.as_json() for problem in problems],
            "notes": notes,
        }
        desk.answer("validate", shown)
    if problems:
        listed = f"{source or 'no inventory'}: {len(problems)} wrong\n{describe_problems(problems)}"
        raise OperatorMistake("" if as_json else listed)
    if not as_json:
        for note in notes:
            desk.say(note)
        desk.say(f"{source} is right: {len(read.variables)} hosts, {tasks} tasks")
