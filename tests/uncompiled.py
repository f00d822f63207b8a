"""Runs a script without compiling its planned graphs, which would take most of the time: ``python uncompiled.py script.py``."""

import runpy
import sys
from pathlib import Path

import autoremat

script = Path(sys.argv[1])
sys.path[0] = str(script.parent)
autoremat.configure(compiler="aot_eager", time_limit=60)
runpy.run_path(str(script), run_name="__main__")
