"""Tests of `paper/`, which is outside the package and imported from the root of the repository."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
