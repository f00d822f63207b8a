"""What must not move when code is deleted or rebuilt: one line for each net, with the rows that moved.

    python benchmarks/nets.py                  # about twenty minutes of one core
    python benchmarks/nets.py --only plans

A moved row is not yet a loss: a step that changes plans states what they cost. Stored rows are in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("-m", "pytest", "-q", "-n0", "--no-header", "--tb=line", "-o", "addopts=")
NETS = {
    "weight": (*PYTEST, "tests/project/test_weight.py"),
    "plans": ("benchmarks/plan_hashes.py", "--check"),
    "least peaks": ("benchmarks/least_peak.py", "--check"),
    "exactness": (*PYTEST, "tests/training/test_exactness.py", "tests/training/test_every_model.py", "tests/passes"),
    "practices": (*PYTEST, "tests/training/test_practices.py", "tests/training/test_policy_steps.py"),
    "ranks": (*PYTEST, "tests/training/test_shards.py", "tests/compiler/test_exchange.py"),
    "budgets": (*PYTEST, "tests/compiler/test_attempts.py", "tests/training/test_training.py"),
    "card": (*PYTEST, "tests/training/test_emulated_cuda.py", "-m", "not card"),
}
SHOWN = 12
"""Last lines of a net that moved."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(NETS), default=list(NETS))
    moved = 0
    for name in parser.parse_args().only:
        begun = time.monotonic()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "AUTOREMAT_PROGRESS": "0"}
        ran = subprocess.run([sys.executable, *NETS[name]], cwd=ROOT, env=environment, capture_output=True, text=True)
        lines = [line for line in ran.stdout.splitlines() if line.strip()]
        print(
            f"{'moved' if ran.returncode else 'pass':<6}{name:<12} {time.monotonic() - begun:5.0f} s  {lines[-1]}", flush=True
        )
        if ran.returncode:
            moved += 1
            print("\n".join(f"      {line}" for line in [*lines, *ran.stderr.splitlines()[-3:]][-SHOWN:]), flush=True)
    return min(moved, 1)


if __name__ == "__main__":
    sys.exit(main())
