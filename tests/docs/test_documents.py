"""The documents tell the truth: their code runs, their links lead somewhere, what they generate is not stale."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import pytest
import trust_kit
from processes import python

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


@pytest.mark.slow
@pytest.mark.parametrize("script", [*TUTORIALS, *HOW_TO], ids=lambda path: path.stem)
def test_tutorials_and_the_code_of_pages_run(script: Path, tmp_path: Path) -> None:
    """In an empty folder, with warnings as errors; their assertions hold. test_packaging runs the README's code."""
    if script.suffix == ".md":
        code = "\n".join(BLOCK.findall(script.read_text()))
        script = tmp_path / "page.py"
        script.write_text(code)
    assert python("-W", "error", script, cwd=tmp_path, timeout=600).stdout


@pytest.mark.slow
def test_the_loops_of_other_libraries(tmp_path: Path) -> None:
    for library in ("pytorch_lightning", "transformers", "accelerate"):
        pytest.importorskip(library)
    blocks = BLOCK.findall((ROOT / "docs" / "loops.md").read_text())
    assert len(blocks) == 7
    printed = python("-c", "\n".join(blocks), cwd=tmp_path, timeout=600).stdout
    found = re.findall(r"\{'.*?: \((\d+), (\d+)\), '.*?: \((\d+),\)\}", printed)
    assert len(found) == 3
    assert all(sum(map(int, ranks)) < 30 for ranks in found)  # they fell


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_become_pages_of_text_and_code(script: Path) -> None:
    page = mkdocs_hooks.page(script.read_text())
    assert page.startswith("# ")
    code = BLOCK.findall(page)
    assert len(code) >= 3
    assert "# %%" not in page
    for block in code:
        compile(block, script.name, "exec")


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


def test_the_site_lists_every_page_and_the_api_every_public_name() -> None:
    """A page that names a room shows all of the room's `__all__`."""
    shown = []
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            found = resolve_name(name)
            shown += [found, *(getattr(found, member) for member in getattr(found, "__all__", ()))]
    for name in bt.__all__:
        thing = getattr(bt, name)
        assert any(thing is other for other in shown), f"docs/api has no {name}"
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    listed = set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for path in (ROOT / "docs").rglob("*.*")
             if path.suffix in (".md", ".py")}  # fmt: skip
    assert pages <= listed
    assert listed - pages <= {*mkdocs_hooks.OUTSIDE, "settings.md"}


PAGES_OF: dict[str, tuple[Path, Callable[[], str]]] = {
    "tools/draw_rooms.py": (draw_rooms.PICTURE, draw_rooms.drawing),
    "benchmarks/old_and_new.py --page": (
        old_and_new.RESULTS / "README.md", lambda: old_and_new.page(old_and_new.RESULTS),
    ),
    "benchmarks/posteriors.py --page": (posteriors.PAGE, posteriors.written),
    "benchmarks/uci.py --page": (uci.PAGE, uci.written),
    "benchmarks/pretrained.py": (pretrained.RESULTS / "PRETRAINED.md", lambda: pretrained.page(pretrained.RESULTS)),
    "-m records": (records.RESULTS / "README.md", lambda: records.page(records.RESULTS)),
    "tests/trust/fuzz.py": (ROOT / "results" / "trust.md", lambda: trust_kit.page(trust_kit.RESULTS)),
}  # fmt: skip


@pytest.mark.parametrize("command", PAGES_OF)
def test_what_is_generated_is_up_to_date(command: str) -> None:
    page, written = PAGES_OF[command]
    if not page.exists():
        pytest.skip(f"{page.name} has not been written yet")
    assert page.read_text() == written(), f"run `python {command}`"


def test_the_tables_of_several_processes_are_up_to_date() -> None:
    if not scaling.RESULT.exists():
        pytest.skip("benchmarks/scaling.py has not been run yet")
    result = json.loads(scaling.RESULT.read_text())
    assert scaling.page(result) == scaling.PAGE.read_text(), "run `python benchmarks/scaling.py`"
    assert all(row["bytes"] == row["formula"] for row in result["rows"])


def test_what_pages_and_digits_are_made_of() -> None:
    assert make_mnist_mini.first_of_each_class(bytes([0, 1, 0, 0, 1, 1]), 2) == [0, 1, 2, 4]
    page = mkdocs_hooks.settings()
    names = [each.name for section in config.SECTIONS.values() for each in dataclasses.fields(section)]
    assert len(names) > 40
    assert all(f"| `{name}` |" in page for name in names)
