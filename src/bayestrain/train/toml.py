"""Configs as TOML: the shipped experiments, a user's own file, `--set key=value`, and writing a complete one.

Every mistake is a `ConfigError` that says where it stands: file and line, or the `--set` it came with.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bayestrain.errors import ConfigError
from bayestrain.files import write_atomically
from bayestrain.train.config import PRESETS, RunConfig, all_settings, check_settings, unknown
from bayestrain.train.settings import layer_modes, shown, suggestion

Keys = tuple[str, ...]
Place = Callable[[Keys], str]

CONFIGS = Path(__file__).parents[1] / "configs"

NAMES = ("mnist-mini", "mnist", "fashion-mnist", "cifar10-cnn", "cifar10-resnet110")
"""The experiments that ship with BayesTrain, smallest first."""


def names() -> tuple[str, ...]:
    """The names that `named` knows."""
    return NAMES


def presets(name: str) -> tuple[str, ...]:
    """The presets that the experiment `name` has."""
    return tuple(preset for preset in PRESETS if _shipped(name, preset).is_file())


def about(name: str) -> str:
    """One line on the experiment `name`: its file's first comment."""
    return _shipped(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def named(name: str, preset: str = "default", overrides: Sequence[str] = ()) -> RunConfig:
    """The shipped config of the experiment `name`, with overrides such as "fit.epochs=3".

    >>> named("mnist", overrides=["fit.epochs=3"]).fit.epochs
    3
    """
    settings = _named_settings(name, preset)
    _override(settings, overrides)
    return RunConfig.from_dict(settings)


def load(path: str | os.PathLike[str], overrides: Sequence[str] = (), base: str = "") -> RunConfig:
    """The config in a TOML file, which is complete or has a line ``base = "mnist"`` to start from.

    Args:
        path: the file.
        overrides: "section.key=value" each, as `--set` takes them.
        base: what to start from when the file does not say: "mnist", or "mnist.paper" for a preset.
    """
    given, place = _read(Path(path))
    if "base" in given:
        if base:
            raise ConfigError(
                f"{place(('base',))}the file says base = {shown(given['base'])} itself. Leave {base} out."
            )
        base = _checked_base(given.pop("base"), place)
    settings = _named_settings(*_split(base)) if base else {}
    _merge(settings, check_settings(given, place))
    _override(settings, overrides)
    try:
        return RunConfig.from_dict(settings)
    except ConfigError as error:
        start = "" if base else ' Or start from a shipped experiment with a first line like base = "mnist".'
        raise ConfigError(f"{path}: {error}{start}") from None


def base_name(name: str, preset: str) -> str:
    """What `base` in a file calls this experiment, if it exists: "mnist" or "mnist.paper"."""
    _named_settings(name, preset)  # raises if there is none
    return name if preset == "default" else f"{name}.{preset}"


def dumps(config: RunConfig) -> str:
    """The complete config as TOML, every setting with its meaning behind it."""
    values = config.to_dict()
    lines: list[str] = []
    section = ""
    for title, field, rule in all_settings():
        if title != section:
            lines += ["", f"[{title}]"] if section else [f"[{title}]"]
            section = title
        value = values[title][field.name]
        if isinstance(value, dict):  # the last setting of its section: TOML wants tables there
            lines += ["", f"[{title}.{field.name}]  # {rule.doc}"]
            lines += [f"{quoted(key)} = {_written(entry)}" for key, entry in value.items()]
        else:
            choices = f" ({', '.join(rule.choices)})" if len(rule.choices) > 1 else ""
            lines.append(f"{field.name} = {_written(value)}  # {rule.doc}{choices}")
    return "\n".join(lines) + "\n"


def save(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write the complete config to a TOML file."""
    write_atomically(Path(path), dumps(config))


def lines_of_keys(text: str) -> dict[Keys, int]:
    """The line of every key and section of a valid TOML text.

    The text is cut into statements, each the fewest lines that parse on their own; so a "key = value" inside a
    string or a comment is never taken for one.

    >>> lines_of_keys('base = "mnist"\\n[fit]\\nlr = 1\\nmilestones = [\\n  0.5,\\n]\\n')
    {('base',): 1, ('fit',): 2, ('fit', 'lr'): 3, ('fit', 'milestones'): 4}
    """
    found: dict[Keys, int] = {}
    table: Keys = ()
    statement = ""
    first = 1
    for number, line in enumerate(text.split("\n"), start=1):
        statement += line + "\n"
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        paths = list(_paths(parsed))
        if statement.lstrip().startswith("["):
            table = paths[-1]
            found.setdefault(table, first)
        else:
            for path in paths:
                found.setdefault(table + path, first)
        statement, first = "", number + 1
    return found


def _paths(parsed: object) -> Iterator[Keys]:
    """Every key path of nested tables, outer ones first."""
    if isinstance(parsed, list):  # [[array of tables]]
        parsed = parsed[-1] if parsed else {}
    for key, value in parsed.items() if isinstance(parsed, dict) else ():
        yield (key,)
        yield from ((key, *rest) for rest in _paths(value))


def _read(path: Path) -> tuple[dict[str, Any], Place]:
    """The file's contents, and a function that says where in it a key stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no TOML file: it must be text in UTF-8 ({error.reason}).") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    text = text.replace("\r\n", "\n")
    try:
        contents = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_malformed(str(path), text, str(error))) from None

    def place(keys: Keys) -> str:
        lines = lines_of_keys(text)
        within = [line for found, line in lines.items() if found[: len(keys)] == keys]  # [a.b] gives a too
        outer = [lines[keys[:n]] for n in range(len(keys) - 1, 0, -1) if keys[:n] in lines]
        line = next(iter(within + outer), None)
        return f"{path}, line {line}: " if line else f"{path}: "

    return contents, place


def _malformed(path: str, text: str, error: str) -> str:
    at = re.search(r" \(at line (\d+), column (\d+)\)$", error)
    if at is None:  # "(at end of document)"
        last = text.rstrip().count("\n") + 1
        return f"{path}, line {last}: not valid TOML: {error}."
    return f"{path}, line {at[1]}: not valid TOML: {error[: at.start()]} (column {at[2]})."


def _named_settings(name: str, preset: str) -> dict[str, dict[str, Any]]:
    if name not in NAMES:
        raise ConfigError(
            f"There is no experiment {shown(name)}.{suggestion(name, NAMES)} The experiments are {', '.join(NAMES)}."
        )
    if preset not in PRESETS:
        raise ConfigError(
            f"There is no preset {shown(preset)}.{suggestion(preset, PRESETS)} The presets are {', '.join(PRESETS)}."
        )
    if preset not in presets(name):
        having = ", ".join(other for other in NAMES if preset in presets(other))
        raise ConfigError(f"{name} has no preset {shown(preset)}. Those that do are {having}.")
    given, place = _read(_shipped(name, preset))
    settings: dict[str, dict[str, Any]] = {}
    if "base" in given:
        settings = _named_settings(*_split(_checked_base(given.pop("base"), place)))
    _merge(settings, check_settings(given, place))
    return settings


def _checked_base(base: object, place: Place) -> str:
    bases = [name if preset == "default" else f"{name}.{preset}" for name in NAMES for preset in presets(name)]
    if not isinstance(base, str) or base not in bases:
        hint = suggestion(base, bases) if isinstance(base, str) else ""
        raise ConfigError(f"{place(('base',))}base must be one of {', '.join(bases)}, got {shown(base)}.{hint}")
    return base


def _split(base: str) -> tuple[str, str]:
    """ "mnist.paper" -> ("mnist", "paper"), "mnist" -> ("mnist", "default")."""
    name, _, preset = base.partition(".")
    return name, preset or "default"


def _shipped(name: str, preset: str = "default") -> Path:
    return CONFIGS / (f"{name}.toml" if preset == "default" else f"{name}.{preset}.toml")


def _merge(settings: dict[str, dict[str, Any]], more: Mapping[str, Mapping[str, Any]]) -> None:
    for section, table in more.items():
        settings.setdefault(section, {}).update(table)


def _override(settings: dict[str, dict[str, Any]], overrides: Sequence[str]) -> None:
    """Put "section.key=value" texts into `settings`, in order."""
    for text in overrides:
        place = f"--set {text}: "
        keys, value = _parsed_override(text)
        if len(keys) == 3 and keys[:2] == ("tensorize", "modes"):  # one layer's modes, the others stay
            try:
                modes = layer_modes(f'tensorize.modes."{keys[2]}"', value)
            except ConfigError as error:
                raise ConfigError(place + str(error)) from None
            old = settings.get("tensorize", {}).get("modes", {})
            _merge(settings, {"tensorize": {"modes": {**old, keys[2]: modes}}})
        elif len(keys) == 2:
            _merge(settings, check_settings({keys[0]: {keys[1]: value}}, lambda _, place=place: place))  # type: ignore[misc]
        else:
            raise ConfigError(place + unknown(keys))


def _parsed_override(text: str) -> tuple[Keys, Any]:
    key, equals, written = (part.strip() for part in text.partition("="))
    try:
        keys = list(_paths(tomllib.loads(f"{key} = 0")))[-1]
    except (tomllib.TOMLDecodeError, IndexError):
        keys = ()
    if not equals or not keys:
        raise ConfigError(f"--set {text}: write section.key=value, for example --set fit.epochs=3.")
    try:
        parsed = tomllib.loads(f"value = {written}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    value = parsed["value"] if list(parsed) == ["value"] else written
    texts = {(section, field.name) for section, field, _ in all_settings() if field.type == "str"}
    return keys, value if keys not in texts or isinstance(value, str) else written


def _written(value: object) -> str:
    """A plain value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return repr(value)


def quoted(text: str) -> str:
    """A text as TOML writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's text is TOML's but for DEL
