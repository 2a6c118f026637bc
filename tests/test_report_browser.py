"""The report in a real browser, from a file: address: no error, no request, nothing empty, nothing cut off."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser, need_browser
from test_report_posterior import posterior_run
from test_report_runs import deep_run, train_run

from bayestrain.report import write_report

PHONE, DESKTOP = (375, 800), (1280, 900)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    need_browser()
    base = tmp_path_factory.mktemp("runs")
    runs = [train_run(base / f"mini{seed}", images=1500, seed=seed) for seed in (0, 1)]
    deep = deep_run(base / "deep", epochs=20)
    posterior = posterior_run(tmp_path_factory.getbasetemp())
    return {
        "run": write_report(runs[0]),
        "deep": write_report(deep),
        "seeds": write_report(runs, base / "seeds.html"),
        "mixed": write_report([*runs, deep], base / "mixed.html"),
        "posterior": write_report(posterior),
        "posteriors": write_report([posterior, posterior / "map"], base / "posteriors.html"),
    }


MEASURE = """
return [...document.querySelectorAll('svg[data-plot]')].map(svg => {
  const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  const texts = [...svg.querySelectorAll('text')];
  const sizes = texts.map(t => parseFloat(getComputedStyle(t).fontSize) * box.width / view.width);
  return {
    name: svg.dataset.plot, width: box.width, height: box.height, left: box.left, right: box.right,
    marks: svg.querySelectorAll('path, use').length, texts: texts.length, smallest: Math.min(...sizes),
    drawn: [...svg.querySelectorAll('path')].filter(p => p.getBBox().width + p.getBBox().height > 0).length,
    overflow: texts.filter(t => {
      const b = t.getBoundingClientRect();
      return b.left < box.left - 4 || b.right > box.right + 4 || b.top < box.top - 4 || b.bottom > box.bottom + 4;
    }).map(t => t.textContent),
  };
});
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("name", ["run", "deep", "seeds", "mixed", "posterior", "posteriors"])
def test_page(chromium: Browser, pages: dict[str, Path], name: str, size: tuple[int, int], scheme: str) -> None:
    chromium.open(pages[name], *size, scheme)
    assert chromium.requests() == [pages[name].resolve().as_uri()]
    assert chromium.console() == []
    assert chromium.script("return document.documentElement.scrollWidth") <= size[0]

    plots = chromium.script(MEASURE)
    assert len(plots) == pages[name].read_text(encoding="utf-8").count("<svg") >= 4
    for plot in plots:
        assert plot["width"] > 200, plot
        assert plot["height"] > 80, plot
        assert plot["left"] >= 0, plot
        assert plot["right"] <= size[0], plot
        assert plot["marks"] > 8, plot
        assert plot["drawn"] > 3, plot
        assert plot["texts"] > 4, plot
        assert plot["smallest"] >= 8, plot
        assert plot["overflow"] == [], plot

    images = chromium.script("return [...document.images].map(i => [i.complete, i.naturalWidth, i.width, i.alt])")
    assert len(images) == {"run": 24, "deep": 24, "posterior": 34}.get(name, 0)
    assert all(complete and natural > 0 and shown >= 64 and alt for complete, natural, shown, alt in images)


@pytest.mark.parametrize("name", ["run", "seeds"])
def test_dark_and_light_differ_in_page_and_figures(chromium: Browser, pages: dict[str, Path], name: str) -> None:
    look = """
    const text = document.querySelector('svg text');
    return [getComputedStyle(document.body).backgroundColor, getComputedStyle(text).fill];
    """
    seen = []
    for scheme in ("light", "dark"):
        chromium.open(pages[name], *DESKTOP, scheme)
        seen.append(chromium.script(look))
    (light_page, light_text), (dark_page, dark_text) = seen
    assert light_page != dark_page
    assert light_text != dark_text


def test_folded_parts_open_and_fit_a_phone(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["deep"], *PHONE)
    chromium.script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert chromium.script("return document.querySelectorAll('details').length") == 3
    assert chromium.script("return document.documentElement.scrollWidth") <= PHONE[0]
    assert "bayestrain" in chromium.script("return document.querySelector('#details').innerText")


def test_printed_it_is_a_few_pages_with_the_folded_parts(
    chromium: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    chromium.open(pages["run"], *DESKTOP, "dark")
    chromium.pdf(tmp_path / "report.pdf")
    content = (tmp_path / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert 3 <= content.count(b"/Type /Page\n") + content.count(b"/Type/Page\n") <= 9


def test_without_a_browser_the_tests_are_left_out_but_fail_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="browser test left out, no chromium"):
        need_browser()
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="CI must run the browser tests"):
        need_browser()
