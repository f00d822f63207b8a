"""Processor time of each kind of unit of a search, over the work that it counts (`autoremat/planner/search/work_limit.py`).

    python benchmarks/work_weights.py                 # prints a table for each model
    python benchmarks/work_weights.py --only llama    # one of them
    python benchmarks/work_weights.py --host-memory   # with saved tensors on the host, and so the joint search

A fair weight gives about one microsecond per unit of work on a machine that does nothing else. The models are small and deep
ones of `plan_hashes.py` and `same_plans.py`, planned for an H100 by name at 30 % of the reference peak.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import model_zoo
import plan_hashes
import same_plans
import torch

import autoremat
from autoremat.capture import forms
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.work_limit import WorkLimit
from autoremat.planner.settings import SETTINGS, FormSettings

SHARE, HOST_BYTES = 0.3, 2**36

MODELS: dict[str, Callable[[], model_zoo.Built]] = {
    name: plan_hashes.MODELS[name] for name in ("mlp", "resnet", "densenet", "unet")
} | {name: same_plans.MODELS[name] for name in ("bert", "gpt2", "llama")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, nargs="+", default=list(MODELS), help="some of the models")
    parser.add_argument("--host-memory", action="store_true", help="lets saved tensors wait on the host")
    arguments = parser.parse_args()
    host = {"host_memory": HOST_BYTES} if arguments.host_memory else {}
    for name in arguments.only:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        options = {"memory_budget": SHARE, "on_infeasible": "best_effort", "chunk_loss": False, **host}
        with mock.patch.object(forms, "SETTINGS", replace(SETTINGS, forms=FormSettings(minimum_bytes=1))):  # of small models
            report = autoremat.explain(model, *inputs, device=same_plans.DEVICE, lower=False, options=options)
        assert report.plan is not None
        assert report.budget_bytes is not None
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        with mock.patch.object(WorkLimit, "unit", timed_unit(found)):
            Planner(report.plan.graph, math.inf, host_bytes=HOST_BYTES).find(report.budget_bytes)
        print(f"{name}, {report.ops:,} ops")
        for kind, (units, work, seconds) in found.items():
            each, fair = 1e3 * seconds / units, 1e6 * seconds / max(work, 1.0)
            print(f"  {kind:<14}{units:6.0f} units{each:9.2f} ms each{fair:7.2f} µs per work")


def timed_unit(found: dict[str, list[float]]) -> Callable[..., Any]:
    """Returns what stands for `WorkLimit.unit`. It adds units, work and seconds to ``found``, by calling function."""

    @contextmanager
    def unit(limit: WorkLimit, work: float = 0.0) -> Iterator[None]:
        kind, done, began = sys._getframe(2).f_code.co_name, limit.done, time.thread_time()
        yield
        limit.add(work)
        entry = found[kind]
        entry[0] += 1
        entry[1] += limit.done - done
        entry[2] += time.thread_time() - began

    return unit


if __name__ == "__main__":
    main()
