"""The one place where the optional room `perf` plugs in.

Everything works without it: `formats`, `nn`, `prior` and `posterior` are complete and readable; `perf` only computes
the same faster. Set the environment variable ``BAYESTRAIN_PERF=0`` to run without.
"""

import os
from functools import lru_cache
from importlib import import_module
from typing import Any

from bayestrain.errors import BayesTrainError

found: Any = None
"""What `fast` returned; code that is being compiled cannot call it."""


@lru_cache(maxsize=1)
def fast() -> Any:
    """The room `bayestrain.perf`, or None where it is switched off."""
    wanted = os.environ.get("BAYESTRAIN_PERF", "1")
    if wanted not in ("0", "1"):
        raise BayesTrainError(f"BAYESTRAIN_PERF must be 0 or 1, got {wanted!r}.")
    global found
    found = import_module("bayestrain.perf") if wanted == "1" else None
    return found
