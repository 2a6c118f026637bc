"""The command line, `bayestrain`. Nothing imports it, and it imports torch only inside the commands that need it."""

from bayestrain.app.cli.app import main

__all__ = ["main"]
