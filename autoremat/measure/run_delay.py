"""The run delay of threads: the time that they wait for a processor because other programs run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

TASKS = "/proc/self/task"


def run_delays() -> dict[str, float]:
    """Returns the run delay of each thread of this process, in seconds since its start; empty where the system counts none.

    Linux counts them (https://docs.kernel.org/scheduler/sched-stats.html).
    """
    found = {}
    with contextlib.suppress(OSError):
        for task in os.listdir(TASKS):
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"{TASKS}/{task}/schedstat") as file:
                found[task] = int(file.read().split()[1]) * 1e-9
    return found


def longest_delay(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Returns the largest increase of the run delay of one thread, in seconds."""
    return max((seconds - before.get(task, 0.0) for task, seconds in after.items()), default=0.0)
