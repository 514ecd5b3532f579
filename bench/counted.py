"""Run `fab`, and write to a file how many processes and connections it began, and how many scripts it had hosts run."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import paramiko
from fabric.main import program

counts = Counter({"processes": 0, "connections": 0, "scripts": 0})


def hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.system"):
        counts["processes"] += 1
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        counts["connections"] += 1


def main() -> None:
    place, sys.argv[:] = Path(sys.argv[1]), ["fab", *sys.argv[2:]]
    execute = paramiko.Channel.exec_command

    def exec_command(channel: paramiko.Channel, *given: Any) -> Any:
        counts["scripts"] += 1
        return execute(channel, *given)

    paramiko.Channel.exec_command = exec_command
    sys.addaudithook(hear)
    os.chdir(Path(__file__).resolve().parent.parent)
    try:
        program.run(sys.argv)
    finally:
        place.write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
