"""The least peak of a step: the best candidate, what the search finds below it, and the proven bound.

    python benchmarks/least_peak.py              # a few minutes
    python benchmarks/least_peak.py --only gpt2 unet
    python benchmarks/least_peak.py --check            # compares with the stored rows; exits 1 if a peak is higher

The models are those of ``plan_hashes.py``, planned for an A100 by name, with Inductor's fusion. RL1 and RL2 are random layered
graphs of one phase, in which any op may run again (``random_layered.py``); the chain is a training step without fusion. Costs
are the added seconds of the plans as shares of the step, and those after the search buy nothing but the least peak.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["AUTOREMAT_PROGRESS"] = "0"

import plan_hashes
import torch
from random_layered import WIDTHS, generate

import autoremat
from autoremat import Graph
from autoremat.planner.search.least_peak import lowered
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.single_phase import bounds_of, split_at, steps_of
from autoremat.planner.search.work_limit import WorkLimit
from autoremat.planner.settings import SETTINGS

RESULTS = Path(__file__).resolve().parent / "results" / "least_peak.json"
DEVICE = "A100-40GB"
WORK = 10.0
"""The time limit, in seconds, whose work each search gets."""

TOLERANCE = 1.005
"""By which a least peak may exceed the stored one."""


@dataclass(frozen=True)
class Row:
    """One graph. Bytes are those of simulated peaks."""

    name: str
    ops: int
    whole_bytes: int
    """Of the step without recomputation."""
    before_bytes: int
    """Of the best candidate."""
    found_bytes: int
    bound_bytes: int
    earlier_bound_bytes: int
    """The bound from the working sets and from a few minimum cuts."""
    cost_before: float
    cost_found: float
    search_seconds: float
    """Seconds of the search below the best candidate."""
    bound_seconds: float

    @property
    def distance(self) -> float:
        """The share by which the least peak found exceeds the bound."""
        return self.found_bytes / self.bound_bytes - 1.0


def captured(name: str) -> Graph:
    """Returns the graph of a model's training step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = plan_hashes.MODELS[name]()
    options = {"cost_model": "roofline", "memory_budget": 1.0}
    report = autoremat.explain(model, *inputs, device=DEVICE, lower=False, options=options)
    assert report.plan is not None
    return report.plan.graph


def graphs() -> Iterator[tuple[str, Graph]]:
    """Yields the graphs by name."""
    for name in plan_hashes.MODELS:
        yield name, captured(name)
    yield "chain", plan_hashes.chain()
    for name, ops in (("RL1", 100), ("RL2", 250)):
        drawn = generate(ops, WIDTHS[ops], seed=0)
        yield name, Graph.from_dag(drawn.seconds, drawn.sizes, drawn.edges)


def of_step(name: str, graph: Graph) -> Row:
    """Returns the row of a training step."""
    planner = Planner(graph, WORK)
    before, earlier = planner.smallest, planner.moments.peak_bytes()
    begun = time.perf_counter()
    bound = max(planner.search.peak_bound, earlier)
    bounded = time.perf_counter()
    found = planner.lowest
    ended = time.perf_counter()
    found.check()
    step = graph.step_seconds
    return Row(
        name, len(graph.ops), planner.baseline.peak_bytes, before.peak_bytes, found.peak_bytes, bound, earlier,
        before.added_seconds / step, found.added_seconds / step, ended - bounded, bounded - begun,
    )  # fmt: skip


def of_one_phase(name: str, graph: Graph) -> Row:
    """Returns the row of a single-phase graph, whose splits are planned as training steps."""
    whole = bounds_of(graph)
    before = min((Planner(step, WORK).smallest for step in steps_of(graph)), key=lambda plan: plan.peak_bytes)
    begun = time.perf_counter()
    limit = WorkLimit(WORK)
    limit.work *= SETTINGS.least_peak.share
    found = lowered([before], whole.peak_bytes(), limit)
    ended = time.perf_counter()
    step = sum(op.seconds for op in graph.ops)
    without = Planner(split_at(graph, len(graph.ops) // 2), WORK).baseline.peak_bytes
    return Row(
        name, len(graph.ops), without, before.peak_bytes, found.peak_bytes, whole.peak_bytes(), whole.peak_bytes(),
        before.added_seconds / step, found.added_seconds / step, ended - begun, 0.0,
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """Returns the rows as text."""
    head = (
        f"{'graph':<9}{'ops':>5}{'whole':>11}{'before':>11}{'found':>11}{'less':>7}{'bound':>11}{'before':>11}{'distance':>9}"
        f"{'cost before':>12}{'found':>7}{'search':>8}{'bound':>7}"
    )
    lines = [
        f"{row.name:<9}{row.ops:>5}{row.whole_bytes:>11}{row.before_bytes:>11}{row.found_bytes:>11}"
        f"{1 - row.found_bytes / row.before_bytes:>7.1%}{row.bound_bytes:>11}{row.earlier_bound_bytes:>11}{row.distance:>9.2%}"
        f"{row.cost_before:>12.2f}{row.cost_found:>7.2f}{row.search_seconds:>6.1f} s{row.bound_seconds:>5.2f} s"
        for row in rows
    ]
    close = sum(row.distance <= 0.03 for row in rows)
    return "\n".join([head, *lines, f"within 3 % of the bound: {close} of {len(rows)}"]) + "\n"


def higher(rows: list[Row]) -> int:
    """Prints the graphs whose least peak is higher than the stored one. Returns 1 if there are any, else 0."""
    stored = {row["name"]: row["found_bytes"] for row in json.loads(RESULTS.read_text())}
    worse = [row for row in rows if row.found_bytes > TOLERANCE * stored[row.name]]
    for row in worse:
        print(f"{row.name}: {row.found_bytes} bytes, {stored[row.name]} before")
    print(f"{len(worse)} of {len(rows)} least peaks are higher")
    return min(len(worse), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None, help="names of graphs; nothing is stored then")
    parser.add_argument("--check", action="store_true", help="store nothing; exit 1 if a least peak is higher than stored")
    arguments = parser.parse_args()
    chosen = arguments.only
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autoremat.BudgetWarning)
    rows = []
    for name, graph in graphs():
        if chosen is None or name in chosen:
            rows.append((of_one_phase if graph.single_phase else of_step)(name, graph))
            print(table(rows[-1:]).splitlines()[1], flush=True)
    if arguments.check:
        sys.exit(higher(rows))
    if chosen is None:
        RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        RESULTS.with_suffix(".txt").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
