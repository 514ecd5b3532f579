"""Two processes of pytest divide the same files: each takes the next one that is free (`--share FOLDER`)."""

from __future__ import annotations

from pathlib import Path

import pytest


def share_option(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=Path, help="an empty folder, where processes note the files of tests they take")


def share_files(config: pytest.Config) -> None:
    """Run the files alone that no process with another cache took."""
    if folder := config.getoption("--share"):
        folder.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(_Sharing(folder, config.getini("cache_dir")))


class _Sharing:
    """The files that this process takes. One that comes later than another begins at the end."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._ours: dict[Path, bool] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if any(self._folder.iterdir()):
            place = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
            items.sort(key=lambda item: -place[item.path])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        return None if self._take(item.path) else True  # True: pytest leaves it out, without a word

    def _take(self, path: Path) -> bool:
        if path not in self._ours:
            taken = self._folder / path.stem
            try:
                with taken.open("x") as file:
                    file.write(self._name)
                self._ours[path] = True
            except FileExistsError:  # also by this process's lane, which runs once more what failed
                self._ours[path] = taken.read_text() == self._name
        return self._ours[path]
