"""TensorBoard with one more tab: the page of a run, or of several side by side, drawn when a browser asks for it.

`python -m trainer.report.tensorboard_tab` takes TensorBoard's own arguments. It serves what TensorBoard does, at the
same port, to the same people. A plugin of TensorBoard is declared by the package that has it; psfleet is no package on
the hosts, so it starts TensorBoard with the plugin (tensorboard.program, which is made for that).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from absl import app
from tensorboard import default, main_lib, program
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import Request, Response

from trainer.core.proxies import bypass_proxies
from trainer.report.html import ASSETS, render, script_digests
from trainer.report.summary import read_summary
from trainer.run.directory import RunDirectory
from trainer.telemetry.status import read_status

MAX_RUNS = 8  # side by side: as many colours as there are


class Pages(base_plugin.TBPlugin):
    """The tab. Its routes read the runs' records and change nothing."""

    plugin_name = "psfleet"

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        place = Path(context.logdir or ".")
        self._runs = place if place.name == "runs" else place / "runs"

    def is_active(self) -> bool:
        return bool(self._names())

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Run pages", disable_reload=True)

    def get_plugin_apps(self) -> Mapping[str, Callable[..., Any]]:
        answers = {"/index.js": self._answer_script, "/runs": self._answer_runs, "/page": self._answer_page}
        return {route: partial(serve, answer) for route, answer in answers.items()}

    def _names(self) -> list[str]:
        try:
            found = [path.parent for path in self._runs.glob("*/run.json")]
            return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]
        except OSError:
            return []

    def _answer_script(self, request: Request) -> Response:
        script = (ASSETS / "board.js").read_text(encoding="utf-8")
        return http_util.Respond(request, script, "text/javascript")

    def _answer_runs(self, request: Request) -> Response:
        """Answer with the runs, the newest first."""
        return http_util.Respond(request, [self._summary(name) for name in self._names()], "application/json")

    def _summary(self, name: str) -> dict[str, Any]:
        try:
            status = read_status(RunDirectory(self._runs.parent, name))
        except (OSError, ValueError):
            return {"run": name, "state": "unknown"}
        return {"run": name, "state": str(status.state), "step": status.step, "steps": status.steps}

    def _answer_page(self, request: Request) -> Response:
        """Answer with the page of the runs that the query names, as `run=a&run=b`."""
        asked, there = list(dict.fromkeys(request.args.getlist("run"))), self._names()
        if not asked or len(asked) > MAX_RUNS:
            return http_util.Respond(request, f"expected 1 to {MAX_RUNS} runs, as in ?run=NAME", "text/plain", 400)
        if strange := [name for name in asked if name not in there]:  # so that no name leads out of the directory
            return http_util.Respond(request, f"there is no run {strange[0]}", "text/plain", 404)
        page = render([read_summary(RunDirectory(self._runs.parent, name)) for name in asked])
        return http_util.Respond(request, page, "text/html", csp_scripts_sha256s=script_digests())


def serve(
    answer: Callable[[Request], Response], environ: dict[str, Any], start_response: Callable[..., Any]
) -> Iterable[bytes]:
    """Answer as WSGI has it (PEP 3333)."""
    return answer(Request(environ))(environ, start_response)


def main(arguments: Iterable[str]) -> None:
    bypass_proxies()  # it asks a process of its own for the events, over gRPC
    main_lib.global_init()
    board = program.TensorBoard(plugins=[*default.get_plugins(), Pages])
    try:
        app.run(board.main, argv=list(arguments), flags_parser=board.configure)
    except base_plugin.FlagsError as error:
        sys.exit(f"psfleet: {error}")


if __name__ == "__main__":
    main(sys.argv)
