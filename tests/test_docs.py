"""The documents tell the truth: their code runs, their names exist, their links lead somewhere, the plan is real."""

from __future__ import annotations

import importlib
import re
import tomllib
from functools import reduce
from pathlib import Path

import grimp
import pytest
import torch

import bayestrain as bt

ROOT = Path(__file__).parents[1]
README, ARCHITECTURE = ROOT / "README.md", ROOT / "ARCHITECTURE.md"
METHOD, POSTERIOR = ROOT / "docs" / "method.md", ROOT / "docs" / "posterior.md"
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")]
ANYTHING = "anything below"


def blocks(path: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def prose(path: Path) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# --- README -----------------------------------------------------------------------------------------------------------


def test_readme_opens_with_the_two_commands() -> None:
    first = re.search(r"^```(\w+)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].split() for line in first[2].splitlines()] == [["make", "demo"], ["make", "test"]]


def test_readme_code_runs_and_makes_a_small_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, code in enumerate(blocks(README, "python"), start=1):
        exec(compile(code, f"README.md, python block {number}", "exec"), names)
    model, fresh, digits, posterior, again = (
        names[name] for name in ("model", "fresh", "digits", "posterior", "again")
    )
    assert bt.count_parameters(model) * 40 < 496_885
    with torch.no_grad():
        answers = model(digits.test.images.float() / 255)
        right = (answers.argmax(1) == digits.test.labels).float().mean()
        torch.testing.assert_close(fresh(digits.test.images[:100].float() / 255), answers[:100])
    assert right > 0.8  # three epochs at a constant rate: far from the best, and far from chance
    assert "1 20 20 20 1" in capsys.readouterr().out
    small = names["small"]
    assert isinstance(small, torch.nn.Module)
    assert bt.count_parameters(small) * 50 <= 496_885
    with torch.no_grad():
        assert (small.eval()(digits.test.images / 255).argmax(1) == digits.test.labels).float().mean() > 0.8
    assert posterior.parameters_each * 40 < 496_885
    prediction = posterior.predict(digits.test.images / 255)
    assert prediction.metrics(digits.test.labels)["accuracy"] > 0.8
    torch.testing.assert_close(again.predict(digits.test.images / 255).mean, prediction.mean)


def test_readme_does_not_exceed_its_promise_of_a_short_example() -> None:
    lines = [line for line in blocks(README, "python")[0].splitlines() if line and "import" not in line]
    assert len(lines) <= 14


# --- every document ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, part = target.partition("#")
        found = document.parent / file if file else document
        assert found.exists(), f"{target} in {document.name}"
        if part:
            headings = re.findall(r"^#+ (.+)$", prose(found), re.MULTILINE)
            assert part in map(anchor, headings), f"{target} in {document.name}"


@pytest.mark.parametrize("document", [METHOD, POSTERIOR], ids=lambda path: path.stem)
def test_every_function_that_the_method_names_exists(document: Path) -> None:
    named = set(re.findall(r"`bayestrain\.([\w.]+)`", document.read_text()))
    assert len(named) > 10
    for name in sorted(named):
        room, *rest = name.split(".")
        top = importlib.import_module(f"bayestrain.{room}")
        while rest and not hasattr(top, rest[0]):  # bayestrain.layers.start.start_variance
            top = importlib.import_module(f"{top.__name__}.{rest.pop(0)}")
        assert reduce(getattr, rest, top) is not None, name


@pytest.mark.parametrize("document", [METHOD, POSTERIOR], ids=lambda path: path.stem)
def test_formulas_are_closed(document: Path) -> None:
    """Even numbers of dollars in a paragraph and balanced braces in a formula: else GitHub shows the source."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"`[^`\n]*`", "", prose(document))):
        assert paragraph.count("$") % 2 == 0, paragraph
    inline = re.findall(r"\$([^$]+)\$", re.sub(r"`[^`\n]*`", "", prose(document)))
    formulas = [*blocks(document, "math"), *inline]
    assert len(formulas) > 20
    for formula in formulas:
        assert formula.count("{") == formula.count("}"), formula
        assert len(re.findall(r"\\Bigl|\\bigl", formula)) == len(re.findall(r"\\Bigr|\\bigr", formula)), formula
        assert len(re.findall(r"\\lVert", formula)) == len(re.findall(r"\\rVert", formula)), formula


# --- the floor plan ---------------------------------------------------------------------------------------------------


def rooms() -> dict[str, str]:
    """The table of rooms: name and the last column."""
    section = ARCHITECTURE.read_text().split("## Rooms")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", section, re.MULTILINE))


def layers() -> list[str]:
    """import-linter's layers, from the top; those side by side one after the other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (lines,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [name.strip() for line in lines for name in line.split("|")]


def modules() -> set[str]:
    """The modules and packages right below `bayestrain`; `__main__` only calls `cli`."""
    source = ROOT / "src" / "bayestrain"
    files = {path.stem for path in source.glob("*.py")} - {"__init__", "__main__"}
    return files | {path.parent.name for path in source.glob("*/__init__.py")}


def test_the_table_of_rooms_is_the_contract_of_import_linter() -> None:
    written = rooms()
    assert set(written) == modules()
    assert {name for name in layers() if not name.startswith("(")} - {"__main__"} <= set(written)
    order = [name for name in (layer.strip("()") for layer in layers()) if name in written]
    assert [name for name in written if name in order] == order


def test_rooms_import_only_what_the_table_allows() -> None:
    written, graph = rooms(), grimp.build_graph("bayestrain", cache_dir=None)
    below = list(written)
    for number, (room, allowed) in enumerate(written.items()):
        wanted = set(below[number + 1 :]) if allowed == ANYTHING else set(re.findall(r"`(\w+)`", allowed))
        inside = {f"bayestrain.{room}", *graph.find_descendants(f"bayestrain.{room}")}
        imported = {
            name.split(".")[1]
            for module in inside
            for name in graph.find_modules_directly_imported_by(module)
            if name.count(".")
        }
        assert imported - {room} <= wanted, room


def test_the_diagram_shows_the_rooms_and_points_downwards() -> None:
    (diagram,) = blocks(ARCHITECTURE, "mermaid")
    arrows = re.findall(r"(\w+) --> (\w+)", diagram)
    order = list(rooms())
    assert {name for arrow in arrows for name in arrow} == set(order)
    assert all(order.index(upper) < order.index(lower) for upper, lower in arrows)
