"""Runs a script on the emulated card: `python -m emulated_cuda SCRIPT ARGUMENTS`, with `tests/` in PYTHONPATH."""

import runpy
import sys
from pathlib import Path

from emulated_cuda import card

card.install()
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
