"""One setting: what it means, which values it may take, and the check. `config.py` declares them all."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from numbers import Integral, Real
from typing import Any

from bayestrain.errors import ConfigError

LayerModes = tuple[tuple[int, ...], tuple[int, ...]]
"""A layer's (in_modes, out_modes)."""

KINDS = {
    "str": "a text in quotes",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "tuple[str, ...]": "a list of texts",
    "tuple[float, ...]": "a list of numbers",
    "Mapping[str, LayerModes]": "a table of layer = [[in modes], [out modes]]",
}
"""The types a setting may have, as annotated, in words."""


@dataclass(frozen=True)
class Rule:
    """A setting's description and the values it may take; a list's bounds hold for each of its entries."""

    doc: str
    choices: tuple[str, ...] = ()
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def allowed(self, kind: str) -> str:
        """The values allowed to a setting of type `kind`, in words: "a number above 0"."""
        if self.choices:
            return ("one of " if self.choices[1:] else "") + ", ".join(shown(choice) for choice in self.choices)
        bounds = (
            ("above", self.above),
            ("of at least", self.at_least),
            ("below", self.below),
            ("at most", self.at_most),
        )
        limits = [f"{word} {bound:.10g}" for word, bound in bounds if bound is not None]
        each = ", each" if limits and kind.startswith("tuple") else ""
        return " ".join([KINDS[kind] + each, " and ".join(limits)]).rstrip()

    def admits(self, number: float) -> bool:
        """Whether `number` is finite and within the bounds."""
        return (
            math.isfinite(number)
            and (self.above is None or number > self.above)
            and (self.at_least is None or number >= self.at_least)
            and (self.below is None or number < self.below)
            and (self.at_most is None or number <= self.at_most)
        )


def setting(
    doc: str,
    default: Any = MISSING,
    *,
    choices: tuple[str, ...] = (),
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A dataclass field with its `Rule`. Without a `default` it must be given."""
    metadata = {"rule": Rule(doc, choices, above, at_least, below, at_most)}
    if isinstance(default, dict):  # a table: not hashable, so left out of the hash, but compared
        return field(default_factory=default.copy, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def checked(name: str, value: object, kind: str, rule: Rule) -> Any:
    """`value` as the setting's type (a list becomes a tuple, a whole number a float), or a `ConfigError`."""

    def wrong() -> ConfigError:
        hint = suggestion(value, rule.choices) if isinstance(value, str) else ""
        return ConfigError(f"{name} must be {rule.allowed(kind)}, got {shown(value)}.{hint}")

    if kind == "Mapping[str, LayerModes]":
        if not isinstance(value, Mapping):
            raise wrong()
        return {str(layer): layer_modes(f'{name}."{layer}"', modes) for layer, modes in value.items()}
    if kind.startswith("tuple"):
        entry_kind = kind.removeprefix("tuple[").removesuffix(", ...]")
        if not isinstance(value, list | tuple) or not all(_fits(entry, entry_kind, rule) for entry in value):
            raise wrong()
        return tuple(_plain(entry, entry_kind) for entry in value)
    if not _fits(value, kind, rule):
        raise wrong()
    return _plain(value, kind)


def layer_modes(name: str, value: object) -> LayerModes:
    """``[[7, 4], [5, 5]]`` as a pair of tuples, or a `ConfigError`."""
    pair = (
        [tuple(modes) for modes in value if isinstance(modes, list | tuple)] if isinstance(value, list | tuple) else []
    )
    if len(pair) != 2 or not all(modes and all(_fits(m, "int", Rule("", at_least=1)) for m in modes) for modes in pair):
        raise ConfigError(
            f"{name} must be [[in modes], [out modes]], two lists of whole numbers of at least 1, got {shown(value)}."
        )
    inputs, outputs = (tuple(int(m) for m in modes) for modes in pair)
    return inputs, outputs


def suggestion(wrong: str, right: Iterable[str]) -> str:
    """' Did you mean "adam"?' with the nearest of `right`, or nothing when none is near."""
    near = difflib.get_close_matches(wrong, list(right), n=1, cutoff=0.6)
    return f" Did you mean {shown(near[0])}?" if near else ""


def shown(value: object) -> str:
    """A value as it would stand in a TOML file, cut if long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(map(shown, value)) + "]"
    else:
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(value: Any, kind: str) -> Any:
    """A number as Python's own: a whole number may stand for a float, and NumPy's for either."""
    return {"int": int, "float": float}.get(kind, lambda same: same)(value)


def _fits(value: object, kind: str, rule: Rule) -> bool:
    if kind == "str":
        return isinstance(value, str) and (not rule.choices or value in rule.choices)
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    return isinstance(value, Integral if kind == "int" else Real) and rule.admits(float(value))  # NumPy's are both
