"""A real browser for tests: headless Chromium through its own driver, with all it asks the network for recorded."""

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


def find_browser() -> tuple[str, str] | None:
    """Paths of Chromium and its driver."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (chromium, driver) if chromium and driver else None


def need_browser() -> tuple[str, str]:
    """The browser; without one the test is left out and says so, in CI it fails."""
    found = find_browser()
    if found is None:
        message = "no chromium with chromedriver on this machine: apt-get install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(f"CI must run the browser tests, but there is {message}")
        pytest.skip(f"browser test left out, {message}")
    return found


class Browser:
    """One page at a time."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, width: int, height: int, scheme: str = "light") -> None:
        """Show a file at a width, light or dark; the logs start anew."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                     mobile=width < 600)  # fmt: skip
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(path.resolve().as_uri())

    def command(self, name: str, **arguments: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def script(self, code: str) -> Any:
        """The value of a JavaScript function body; the browser evaluates it even where the page forbids scripts."""
        return self.driver.execute_script(code)

    def console(self) -> list[str]:
        """Console messages since `open`."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """All addresses asked for since `open`, except data: ones."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        addresses = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [address for address in addresses if not address.startswith("data:")]

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path) -> None:
        """The page as it would be printed on A4."""
        sheet = self.command("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        path.write_bytes(base64.b64decode(sheet["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile, gone afterwards."""
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


def take_shots(page: Path, folder: Path, name: str) -> None:
    """Screenshots of a page for people: light, dark, phone, printed."""
    folder.mkdir(parents=True, exist_ok=True)
    with browser() as chromium:
        for label, width, height, scheme in (
            ("light", 1280, 900, "light"), ("dark", 1280, 900, "dark"), ("phone", 375, 800, "light"),
            ("phone-dark", 375, 800, "dark"),
        ):  # fmt: skip
            chromium.open(page, width, height, scheme)
            chromium.screenshot(folder / f"{name}-{label}.png")
        chromium.open(page, 1280, 900)
        chromium.pdf(folder / f"{name}-print.pdf")


if __name__ == "__main__":
    take_shots(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
