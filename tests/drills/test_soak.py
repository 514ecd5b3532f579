"""Ten minutes of faults by chance, each time with another seed."""

import os
import subprocess

from .conftest import ROOT


def test_no_promise_is_broken_in_ten_minutes_of_faults_by_chance() -> None:
    # Generous for the same reason as the drills' own bounds.
    command = ["fab", "drill", "--random", "--minutes=10", "--bounds-factor=2"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
