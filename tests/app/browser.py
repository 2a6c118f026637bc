"""A real browser for tests: headless Chromium, which records what a page asks the network for.

``python tests/app/browser.py PAGE FOLDER`` takes screenshots of a page for people to look at.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--no-default-browser-check",
    "--disable-default-apps", "--disable-extensions", "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip


def need_browser() -> tuple[str, str]:
    """Paths of Chromium and its driver; without them the test is skipped, in CI it fails."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium, driver = next(filter(None, map(shutil.which, names)), None), shutil.which("chromedriver")
    if chromium and driver:
        return chromium, driver
    message = "no chromium with chromedriver on this machine: apt-get install chromium chromium-driver"
    if os.environ.get("CI"):
        pytest.fail(f"CI must run the browser tests, but there is {message}")
    pytest.skip(message)


class Browser:
    """One page at a time."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, width: int, scheme: str = "light") -> None:
        """Show a file at a width, light or dark; clears the logs first."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                     mobile=width < 600)  # fmt: skip
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(path.resolve().as_uri())

    def command(self, name: str, **arguments: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def script(self, code: str) -> Any:
        """The value of a JavaScript function body; evaluated even where the page forbids scripts."""
        return self.driver.execute_script(code)

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """All addresses asked for since `open`, except data addresses."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        addresses = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [address for address in addresses if not address.startswith("data:")]

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile, removed afterwards."""
    chromium, chromedriver = need_browser()
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options, Service(chromedriver, log_output=subprocess.DEVNULL))
        try:
            yield Browser(driver)
        finally:
            driver.quit()


if __name__ == "__main__":
    page, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    with browser() as chromium:
        for label, width, scheme in (("desktop", 1200, "light"), ("phone", 390, "light"), ("dark", 1200, "dark")):
            chromium.open(page, width, scheme)
            chromium.screenshot(folder / f"{page.parent.name}-{label}.png")
