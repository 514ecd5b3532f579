"""Debian's chromium without a screen, and what a test asks of a page in it."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
WAIT_SECONDS = 60
DRAWN = "return !!window.psfleet && window.psfleet.figures.every((figure) => figure.chart)"


class Browser:
    """A window of chromium. It asks no network but this machine: a name is resolved to nothing."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for word in (
            "headless=new",
            "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "hide-scrollbars",
            "disable-gpu",
        ):
            options.add_argument(f"--{word}")
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")  # which chromium refuses to root
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, Service(DRIVER))
        self.driver.set_script_timeout(WAIT_SECONDS)
        self.size(1280, 900)

    def close(self) -> None:
        self.driver.quit()

    def open(self, page: Path, *, drawn: bool = True) -> None:
        """Open a page, and wait until all its figures are `drawn`."""
        self.driver.get("about:blank")
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)  # what was before is forgotten
        self.driver.get(page.resolve().as_uri())
        if drawn:
            self.wait(DRAWN)

    def wait(self, script: str, *arguments: Any) -> Any:
        return WebDriverWait(self.driver, WAIT_SECONDS, poll_frequency=0.05).until(
            lambda driver: driver.execute_script(script, *arguments)
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """Return what stands in the console, of whatever weight."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def fetched(self) -> list[str]:
        """Return the addresses of all that was asked for since the page was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    @contextmanager
    def media(self, kind: str = "", scheme: str = "") -> Iterator[None]:
        """Have the page believe that it is printed, or that its reader wants it dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}] if scheme else []
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": features})
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})

    def hover(self, box: Any, x: float, y: float) -> None:
        """Move the mouse to a place of an element, in pixels from its upper left corner."""
        self.run("arguments[0].scrollIntoView({block: 'center'})", box)
        rectangle = box.rect
        actions = ActionChains(self.driver, duration=50)
        actions.move_to_element(self.driver.find_element(By.TAG_NAME, "h1"))
        actions.move_to_element_with_offset(box, round(x - rectangle["width"] / 2), round(y - rectangle["height"] / 2))
        actions.perform()

    def print(self, path: Path) -> None:
        """Write the page as a PDF."""
        path.write_bytes(base64.b64decode(self.driver.print_page()))
