"""The model card that `save` writes: ``README.md`` in the format of the Hub, with what is known of the model."""

from collections.abc import Iterable, Mapping
from typing import Any

from bayestrain.tables import times

HEAD = "---\nlibrary_name: bayestrain\ntags:\n- compression\n- low-rank\n---\n"  # other READMEs are left alone


def card(about: Mapping[str, Any], ranks: Mapping[str, Iterable[int]]) -> str:
    """The card of a model that `about` describes as ``model.json`` does; `ranks` are those of its weights."""
    size, what = about["parameters"], "A network"
    if about["kind"] == "posterior":
        what = f"A posterior of {about['particles']} networks, each"
    ratio = about["dense_parameters"] / max(size, 1)
    parts = [HEAD, f"# {_plain(about.get('name', 'A compact network'))}\n"]
    parts += [f"{what} with {size:,} parameters, {ratio:.3g} times fewer than with dense layers.\n"]
    parts += [f"{key.capitalize()}: {_plain(about[key])}\n" for key in ("data", "classes") if about.get(key)]
    if "temperature" in (likelihood := about.get("likelihood") or {}):
        parts += [f"Its probabilities are calibrated with the temperature {likelihood['temperature']:.4g}.\n"]
    if isinstance(metrics := about.get("metrics"), Mapping) and metrics:
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in metrics.items()}
        rows = [(str(key).replace("_", " "), _plain(value)) for key, value in shown.items()]
        parts += ["## Figures on the test data\n", _table([("figure", "value"), *rows])]
    if weights := about["weights"].items():
        shapes = [(path, each["format"], times(each["layout"]["shape"]), times(ranks[path])) for path, each in weights]
        parts += ["## Ranks\n", _table([("weight", "format", "shape", "ranks"), *shapes])]
    built = "" if about.get("network") else ", into=build()"
    note = f"  # {_plain(about.get('model', 'the network as it was built'))}" if built else ""
    code = f'import bayestrain as bt\n\nmodel = bt.load("FOLDER"{built}){note}'
    return "\n".join([*parts, f"## Load\n\n```python\n{code}\n```\n"])


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = [[_plain(cell) for cell in row] for row in rows]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _plain(value: object) -> str:
    """On one line, without what Markdown takes for the end of a cell or for HTML."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = text.encode(errors="replace").decode()  # half a surrogate pair is no text
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
