"""The command line, `bayestrain`. Nobody imports it. Torch is only imported inside of commands that need it."""

from bayestrain.cli.app import main

__all__ = ["main"]
