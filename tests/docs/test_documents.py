"""The documents tell the truth: their code runs, their links lead somewhere, what they generate is not stale."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import trust_kit

import bayestrain as bt
from bayestrain.train import config
from benchmarks import old_and_new, posteriors, pretrained, scaling, uci
from records import __main__ as records
from tools import draw_rooms, make_mnist_mini, mkdocs_hooks

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("paper/**/*.md"),
                *ROOT.glob("results/**/*.md")])  # fmt: skip
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
HOW_TO = [ROOT / "docs" / "deploy.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# --- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("script", [*TUTORIALS, *HOW_TO], ids=lambda path: path.stem)
def test_tutorials_and_the_code_of_pages_run(script: Path, tmp_path: Path) -> None:
    """In an empty folder, with warnings as errors; their assertions hold. test_packaging runs the README's code."""
    if script.suffix == ".md":
        code = "\n".join(BLOCK.findall(script.read_text()))
        script = tmp_path / "page.py"
        script.write_text(code)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    outside = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_become_pages_of_text_and_code(script: Path) -> None:
    page = mkdocs_hooks.page(script.read_text())
    assert page.startswith("# ")
    code = BLOCK.findall(page)
    assert len(code) >= 3
    assert "# %%" not in page
    for block in code:
        compile(block, script.name, "exec")


# --- links and names --------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """To a file of the repository and a heading of it, or to a tutorial's page on the site."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if found.suffix == ".md" and found.parent.name == "tutorials":
            found = found.with_suffix(".py")
        assert found.exists(), f"{page.name} links to {target}"
        assert found.is_relative_to(ROOT)
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/method.md"])
def test_functions_and_files_that_the_text_names_exist(page: str) -> None:
    """`prior.density.log_prob` is of the package; `formats/tt.py` and `compact/` lie in it or in the repository."""
    rooms = "|".join(path.stem for path in (ROOT / "src" / "bayestrain").iterdir() if path.stem != "files")
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", text):
        if re.fullmatch(rf"({rooms})(\.\w+)+", code) and not code.endswith(".py"):
            resolve_name(f"bayestrain.{code}")
        if re.fullmatch(r"(\w+/)+(\w+\.(py|md|toml))?", code) and "yours" not in code:
            assert (ROOT / code).exists() or (ROOT / "src" / "bayestrain" / code).exists(), f"{page} names {code}"


def test_the_api_pages_have_every_public_name_and_no_other() -> None:
    """A page that names a room shows all of the room's `__all__`."""
    shown = []
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            found = resolve_name(name)
            shown += [found, *(getattr(found, member) for member in getattr(found, "__all__", ()))]
    for name in bt.__all__:
        thing = getattr(bt, name)
        assert any(thing is other for other in shown), f"docs/api has no {name}"


def test_the_site_lists_every_page_of_docs() -> None:
    """`mkdocs build --strict` checks the rest: that they exist, and that their links lead somewhere."""
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    listed = set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for path in (ROOT / "docs").rglob("*.*")
             if path.suffix in (".md", ".py")}  # fmt: skip
    assert pages <= listed
    assert listed - pages <= {*mkdocs_hooks.OUTSIDE, "settings.md"}


# --- generated files --------------------------------------------------------------------------------------------------


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    assert draw_rooms.PICTURE.read_text() == draw_rooms.drawing(), "run `python tools/draw_rooms.py`"


def test_the_page_of_speed_is_up_to_date() -> None:
    page = old_and_new.RESULTS / "README.md"
    assert page.read_text() == old_and_new.page(old_and_new.RESULTS), "run `python benchmarks/old_and_new.py --page`"


@pytest.mark.parametrize(
    ("module", "known"), [(pretrained, pretrained.RESULTS / "PRETRAINED.md"), (records, records.RESULTS / "README.md")]
)
def test_the_pages_of_gpu_records_are_up_to_date(module: Any, known: Path) -> None:
    if not known.exists():
        pytest.skip(f"{known.name} has not been written yet")
    assert known.read_text() == module.page(module.RESULTS), f"write {known} again"


def test_the_pages_of_posteriors_are_up_to_date() -> None:
    for benchmark in (posteriors, uci):
        assert benchmark.PAGE.read_text() == benchmark.written(), f"run `python {benchmark.__file__} --page`"


def test_the_tables_of_several_processes_are_up_to_date() -> None:
    if not scaling.RESULT.exists():
        pytest.skip("benchmarks/scaling.py has not been run yet")
    result = json.loads(scaling.RESULT.read_text())
    assert scaling.page(result) == scaling.PAGE.read_text(), "run `python benchmarks/scaling.py`"
    assert all(row["bytes"] == row["formula"] for row in result["rows"])


def test_the_page_of_trust_is_up_to_date() -> None:
    assert (ROOT / "results" / "trust.md").read_text() == trust_kit.page(trust_kit.RESULTS), "run `make fuzz` again"


def test_mnist_mini_takes_the_first_digits_of_each_class() -> None:
    assert make_mnist_mini.first_of_each_class(bytes([0, 1, 0, 0, 1, 1]), 2) == [0, 1, 2, 4]


def test_the_page_of_settings_has_every_setting() -> None:
    page = mkdocs_hooks.settings()
    names = [each.name for section in config.SECTIONS.values() for each in dataclasses.fields(section)]
    assert len(names) > 40
    assert all(f"| `{name}` |" in page for name in names)
