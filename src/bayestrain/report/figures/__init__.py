"""The report's figures: each function takes a `Run` and returns its plots, none if the run lacks the data."""

FEW_LAYERS = 6
"""Up to this many layers each gets figures of its own; beyond, maps show all at once and two stand as examples."""

PANEL_ROWS = 24
"""Rows of one figure that lists layers; more of them continue in the next figure beside it."""
