"""The pages in headless Chromium, from a file: no error, no request, nothing cut off, on a phone too."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folders import deep_layers, unfinished, write_run

from bayestrain.app.report import write_report

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--no-default-browser-check",
    "--disable-default-apps", "--disable-extensions", "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A driver of a browser with an empty profile; without one the test is skipped, in CI it fails."""
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    chromedriver = shutil.which("chromedriver")
    if not (found and chromedriver):
        message = "no chromium with chromedriver on this machine: apt-get install chromium chromium-driver"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(chromedriver, log_output=subprocess.DEVNULL))
    yield driver
    driver.quit()


def show(driver: Any, path: Path, width: int, scheme: str = "light") -> None:
    """Open a file at a width, light or dark, with empty logs."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    for log in ("browser", "performance"):
        driver.get_log(log)
    driver.get(path.resolve().as_uri())


def requests(driver: Any) -> list[str]:
    """All addresses asked for, except data addresses."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    addresses = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [address for address in addresses if not address.startswith("data:")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("runs")
    long = "a_name_without_any_space_" * 6
    runs = {
        "posterior": write_run(base / "posterior", "posterior", name=long),
        "regression": write_run(base / "regression", "regression-posterior"),
        "deep": write_run(base / "deep", layers=deep_layers()),
        "unfinished": unfinished(write_run(base / "unfinished")),
    }
    return {name: write_report(folder) for name, folder in runs.items()}


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("name", ["posterior", "regression", "deep", "unfinished"])
def test_page(chromium: Any, pages: dict[str, Path], name: str, width: int) -> None:
    show(chromium, pages[name], width)
    chromium.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert requests(chromium) == [pages[name].resolve().as_uri()]
    assert chromium.get_log("browser") == []
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
    outside = f"""return [...document.querySelectorAll('h1, h2, h3, p, dt, dd, figure, img, summary, li')]
        .filter(e => e.getBoundingClientRect().right > {width} || e.getBoundingClientRect().left < 0)
        .map(e => e.tagName + e.textContent)"""
    assert chromium.execute_script(outside) == []
    measure = "return [...document.images].map(i => [i.complete && i.naturalWidth > 0, i.width, i.height, i.alt])"
    images = chromium.execute_script(measure)
    assert all(loaded and shown >= 84 and height >= 84 and alt for loaded, shown, height, alt in images)
    assert len(images) >= 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(chromium: Any, pages: dict[str, Path], scheme: str) -> None:
    """Contrast of at least 4.5 between every text and the card behind it (WCAG AA)."""
    show(chromium, pages["posterior"], 1200, scheme)
    contrasts = chromium.execute_script("""
        const channel = v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
        const light = c => { const [r, g, b] = c.match(/\\d+/g).map(Number).map(channel);
                             return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const behind = e => { for (; e; e = e.parentElement) {
            const c = getComputedStyle(e).backgroundColor; if (c != 'rgba(0, 0, 0, 0)') return c; } };
        return [...document.querySelectorAll('p, h1, h2, h3, dt, dd, td, th, figcaption, summary')].map(e => {
            const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); });
    """)
    assert len(contrasts) > 50
    assert min(contrasts) >= 4.5
