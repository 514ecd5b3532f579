"""`fab validate`: everything that can be said of an inventory without asking a host."""

from __future__ import annotations

import os

from fleet.actions.console import Console
from fleet.errors import OperatorMistake
from fleet.site.inventory import describe, find_problems, list_notes
from fleet.site.reader import read_source
from fleet.site.schema.problems import Problem, describe_problems


def validate(
    console: Console,
    given: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Say whether an inventory is right. With `--json`, all problems; else the first ten.

    Raises OperatorMistake when it is not; its message is empty where JSON said it.
    """
    source, problems, notes, tasks = None, [], [], 0
    try:
        read = read_source(given, os.environ, True, ask_vault_pass)
        source = read.name
        problems = find_problems(read)
        if not problems:
            inventory = describe(read)
            notes, tasks = list_notes(inventory), len(inventory.tasks)
    except OperatorMistake as error:
        problems = [Problem(str(error))]
    shown = {
        "inventory": source,
        "right": not problems,
        "problems": [problem.as_json() for problem in problems],
        "notes": notes,
    }
    console.print_json("validate", shown)
    if problems:
        head = f"{source}: {len(problems)} wrong\n" if source else ""
        raise OperatorMistake(f"{head}{describe_problems(problems)}" if console.json_out is None else "")
    if console.json_out is None:
        for note in notes:
            console.print(note)
        hosts = len(read.variables)
        console.print(f"{source} is right: {hosts} host{'' if hosts == 1 else 's'}, {tasks} tasks")
