"""The pages in a real browser, from a file: no error, no request, nothing cut off, on a phone too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser, need_browser
from run_folders import deep_layers, unfinished, write_run

from bayestrain.app.report import write_comparison, write_report


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    need_browser()
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("runs")
    long = "a_name_without_any_space_" * 6
    runs = {
        "posterior": write_run(base / "posterior", "posterior", name=long),
        "regression": write_run(base / "regression", "regression-posterior"),
        "deep": write_run(base / "deep", layers=deep_layers(), pictures=False),
        "unfinished": unfinished(write_run(base / "unfinished")),
    }
    pages = {name: write_report(folder) for name, folder in runs.items()}
    return {**pages, "comparison": write_comparison(list(runs.values()), base / "comparison.html")}


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("name", ["posterior", "regression", "deep", "unfinished", "comparison"])
def test_page(chromium: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    chromium.open(pages[name], width)
    chromium.script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert chromium.requests() == [pages[name].resolve().as_uri()]
    assert chromium.console() == []
    assert chromium.script("return document.documentElement.scrollWidth") <= width
    outside = f"""return [...document.querySelectorAll('h1, h2, h3, p, dt, dd, figure, img, summary, li')]
        .filter(e => e.getBoundingClientRect().right > {width} || e.getBoundingClientRect().left < 0)
        .map(e => e.tagName + e.textContent)"""
    assert chromium.script(outside) == []
    measure = "return [...document.images].map(i => [i.complete && i.naturalWidth > 0, i.width, i.height, i.alt])"
    images = chromium.script(measure)
    assert all(loaded and shown >= 84 and height >= 84 and alt for loaded, shown, height, alt in images)
    if name != "comparison":
        assert len(images) >= 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(chromium: Browser, pages: dict[str, Path], scheme: str) -> None:
    """Contrast of at least 4.5 between every text and the card behind it (WCAG AA)."""
    chromium.open(pages["posterior"], 1200, scheme)
    contrasts = chromium.script("""
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
