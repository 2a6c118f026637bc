"""The report's colours, in one place: figures draw with the light ones, the page swaps in the dark ones.

Each meaning has one colour everywhere: `kept` is what the network kept, `cut` what was dropped or was there before,
`paper` the published result, `map` a single network beside a posterior, `ood` images of another data set, `warn` what
is wrong, `series` bonds or runs in order. All differ from the card behind them by a contrast of at least 3:1, text by
4.5:1 (tested).
"""

LIGHT = {
    "page": "#f4f5f7",
    "card": "#ffffff",
    "ink": "#17202b",
    "muted": "#566170",
    "line": "#d9dde3",
    "cut": "#868f9c",
    "kept": "#1f5fd0",
    "paper": "#b85a00",
    "warn": "#b3261e",
    "map": "#0b7d73",
    "ood": "#8445c2",
    "c1": "#1f5fd1",
    "c2": "#0c857a",
    "c3": "#8a48c8",
    "c4": "#c9306b",
    "c5": "#66770b",
    "c6": "#8a5a44",
}

DARK = {
    "page": "#0f1318",
    "card": "#181e26",
    "ink": "#e8ecf1",
    "muted": "#a3aebc",
    "line": "#313a46",
    "cut": "#798493",
    "kept": "#6ea8ff",
    "paper": "#ffa24d",
    "warn": "#ff8a80",
    "map": "#4ad3c3",
    "ood": "#bd97fd",
    "c1": "#6ea8fe",
    "c2": "#45cfbf",
    "c3": "#c09bff",
    "c4": "#ff85b0",
    "c5": "#c3d155",
    "c6": "#d8a58c",
}

SERIES = tuple(LIGHT[f"c{k}"] for k in range(1, 7))


def series(index: int) -> str:
    """Colour of the bond or run number `index`, counted from 0."""
    return SERIES[index % len(SERIES)]


def css(colours: dict[str, str]) -> str:
    """The colours as CSS custom properties."""
    return " ".join(f"--{name}: {value};" for name, value in colours.items())
