"""`transformers`: its models save and load at their learned ranks by their own methods. Imports nothing heavy."""

import importlib.util
import sys
from importlib import import_module
from typing import Any

MODELS, OURS = "transformers.modeling_utils", "bayestrain.hub.models"


class Watch:
    """Among Python's importers: imports `OURS` when `transformers` has loaded its models."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != MODELS:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), import_module(OURS))
        return spec


def watch() -> None:
    """Extend `transformers` now, or when it is imported."""
    if MODELS in sys.modules:
        import_module(OURS)
    else:
        sys.meta_path.insert(0, Watch())
