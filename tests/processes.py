"""Python in a process of its own, on one thread."""

import os
import subprocess
import sys
from typing import Any

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
WITH_TESTS = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
"""The same for code that imports modules of the tests."""


def python(*arguments: object, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` says, which must end with this status."""
    options = {"env": ENVIRONMENT, "timeout": 300, **options}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == status, (done.stdout + done.stderr)[-3000:]
    return done
