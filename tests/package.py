"""The package as it is published: its wheel, and an environment with it that no checkout is in."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What pip's entry points are, for programs of the libraries that are only lent.
_PROGRAM = "#!{python}\nimport sys\nfrom {module} import {name}\nsys.exit({name}())\n"
_LENT = {"ansible-playbook": ("ansible.cli.playbook", "main"), "fab": ("fabric.main", "program.run")}


@dataclass(frozen=True)
class Installed:
    """A Python environment with the package."""

    path: Path

    def run(self, directory: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in a directory, without anything that leads to a checkout."""
        led = ("PYTHON", "ANSIBLE_", "PSFLEET_", "TRAINER_", "TF_", "VIRTUAL_ENV")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(led)}
        return subprocess.run(
            [str(self.path / "bin" / command[0]), *command[1:]],
            cwd=directory,
            env=kept | {"PATH": "/usr/bin:/bin"} | variables,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )


def build_wheel(directory: Path) -> Path:
    """Build the checkout's wheel, as a front end does without isolation, and so without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = directory.glob("psfleet-*.whl")
    return wheel


def install_beside_lent_libraries(wheel: Path, path: Path) -> Installed:
    """Install the wheel alone into an environment that is empty but for the libraries of this one.

    The wheel's own program is installed. Ansible's and Fabric's are written here, as their wheels would.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    python = path / "bin" / "python"
    command = ["uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    lent = path / "lib" / minor / "site-packages" / "lent.pth"
    lent.write_text(f"{sysconfig.get_path('purelib')}\n")
    for program, (module, name) in _LENT.items():
        file = path / "bin" / program
        first, _, rest = name.partition(".")
        text = _PROGRAM.format(python=python, module=module, name=first)
        file.write_text(text.replace(f"{first}()", f"{first}.{rest}()") if rest else text)
        file.chmod(0o755)
    return Installed(path)


def install(wheel: Path, path: Path) -> Installed:
    """Install the wheel with all that it needs, in the versions of the control machine's lock."""
    python = str(path / "bin" / "python")
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(path)], check=True)
    command = ["uv", "pip", "install", "--quiet", "--constraint", "locks/control.txt", "--python", python, str(wheel)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Installed(path)
