"""paper/README.md: every function, preset, test and result that it names exists, and so do its commands."""

import re
import shlex
from argparse import ArgumentParser
from pkgutil import resolve_name

import pytest
from table_kit import RESULTS, ROOT

from paper import experiment, seeds

README = (ROOT / "paper" / "README.md").read_text()
ELEMENTS = README.split("\n## The paper, element by element\n")[1].split("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in ELEMENTS.splitlines() if line[:1] == "|"][2:]
NAMED = re.compile(r"`([^`]+)`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_an_element_has_its_function_its_test_and_its_result(row: list[str]) -> None:
    _, functions, tests, results = row
    for name in NAMED.findall(functions):
        if name.endswith(".toml"):
            assert (ROOT / "paper" / name).is_file(), name
        elif name.startswith(("bayestrain.", "paper.")):
            resolve_name(name)
        else:
            assert "=" in name, f"{name} is neither a function, nor a preset, nor an argument"
    assert NAMED.findall(tests)
    for name in NAMED.findall(tests):
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file(), name
        assert not test or re.search(rf"^ *def {test}\(", (ROOT / path).read_text(), re.MULTILINE), name
    for name in NAMED.findall(results):
        assert (RESULTS / name / "summary.json").is_file() or (RESULTS / name).is_file(), name


def test_the_commands_for_single_lines_train_something() -> None:
    assert len(ROWS) >= 20
    (block,) = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    commands = block.replace("\\\n", " ").strip().splitlines()
    assert len(commands) == 4
    for line in commands:
        program, module, name, *words = shlex.split(line)
        assert (program, module, name) == ("python", "-m", "paper.seeds")
        parser = ArgumentParser()
        experiment.options(parser)
        seeds.add_options(parser)
        given = parser.parse_args(words)
        assert experiment.chosen(seeds.for_seed(given, 0), 0).fit.epochs > 0
        assert not (RESULTS / given.experiment / given.label).exists()
