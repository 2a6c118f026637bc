"""Files of `transformers`: its models save and load at their learned ranks by its own methods. Imports nothing heavy."""

import importlib.util
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODELS = "transformers.modeling_utils"


class Watch:
    """Among Python's importers: imports `bayestrain.hub.models` when `transformers` has loaded its models."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        if name != MODELS:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            import_module("bayestrain.hub.models")

        spec.loader.exec_module = exec_module
        return spec  # type: ignore[no-any-return]


def watch() -> None:
    """Extend `transformers` now, or when it is imported."""
    if MODELS in sys.modules:
        import_module("bayestrain.hub.models")
    else:
        sys.meta_path.insert(0, Watch())
