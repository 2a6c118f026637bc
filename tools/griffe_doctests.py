"""An extension of the API pages: doctests in docstrings are shown as Python code, not as quotations in quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^([ \t]*)>>> .*(?:\n[ \t]*\S.*)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """The docstring with a fence around every doctest, from ``>>>`` to the next empty line, and no double colons."""
    found = DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", docstring)
    return re.sub(r"::$", ":", found, flags=re.MULTILINE)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
