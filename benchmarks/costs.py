"""The predicted cost of recomputation by each cost model against measured steps, and our steps against those of torch's plans.

    python benchmarks/costs.py            # all models, an hour or more on an idle machine
    python benchmarks/costs.py --only unet --rounds 3

Plans are autoremat's at several budgets, torch's at several values of `activation_memory_budget`, those of per-block
checkpointing, and autoremat's at the measured peaks of these. Each is compiled by Inductor and priced by every cost model on
the joint graph that it was made for. Overheads are beside plain Inductor on the same model, in shares of its step. They are
predicted from recomputation and saves. They are measured as medians of steps that all plans of the model take in turn. Each
plan that is not ours, plain Inductor's among them, meets the fastest of ours whose measured peak is no higher. Only an idle
machine gives figures worth keeping.
"""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import model_zoo
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from harness import in_turn, measured_peak, mebibytes, parser, percent, run, table, training_step
from rich.table import Table
from torch import fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

from autoremat.basics.errors import BudgetInfeasible, find_cause
from autoremat.capture.capture import Capture, capture
from autoremat.capture.pricing import Prices
from autoremat.compiler import compile_loop
from autoremat.compiler.planned_graph import PlannedGraph
from autoremat.compiler.reference import schedule_of_partition
from autoremat.options.options import COST_MODELS
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.plans.plan import Plan
from autoremat.torch_private import compilers, joint_graphs

MODELS = ("gpt2-12", "llama-12", "bert-12", "t5-6", "vit-12", "resnet-18", "densenet", "unet")
SIZES = {"HIDDEN": 256, "BATCH": 4, "LENGTH": 256}
"""Constants of `model_zoo`: in its own sizes much of a step is the time of calls."""

SHARES = (1.0, 0.8, 0.6, 0.5, 0.4)
TORCH_BUDGETS = (0.8, 0.5, 0.2)
BLOCK_LISTS = ("h", "layers", "layer", "block", "blocks", "stages")
"""Names of the lists of repeated blocks in the models."""

RESOLVED = 0.04
"""Measured steps that differ by a smaller share count as equal."""


@dataclass(frozen=True)
class Row:
    """One plan of one model. Overheads are added seconds as shares of plain Inductor's step."""

    model: str
    method: str
    step_seconds: float
    peak_bytes: int
    """Measured, above those live when the step begins."""
    measured: float
    predicted: dict[str, float]


@dataclass(frozen=True)
class Recorded:
    """The graph that a plan was made for, as captured, and the plan's schedule."""

    captured: Capture
    schedule: Schedule


class TorchPartitioner(joint_graphs.CustomPartitionerFn):
    """Torch's own partitioner, at the budget in force, which leaves a record of its partition."""

    def __init__(self, records: list[Recorded]) -> None:
        self.records = records

    def uuid(self) -> None:
        """Returns None, so that torch does not cache."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchPartitioner:
        return self

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **keywords: Any) -> joint_graphs.PartitionedModules:
        joint = joint_graphs.prepare_joint(gm, keywords["num_fwd_outputs"])
        captured = capture(_copied(joint), keywords["num_fwd_outputs"], fuses=True)
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **keywords)
        self.records.append(Recorded(captured, schedule_of_partition(captured, forward, backward)))
        return forward, backward


def _copied(joint: fx.GraphModule) -> fx.GraphModule:
    return fx.GraphModule(joint, copy.deepcopy(joint.graph))


def recording(records: list[Recorded]) -> Callable[..., PlannedGraph]:
    """Returns `plan_graph`, extended to leave a record. The graph is copied, because it is rewritten afterwards."""
    plan_graph = compile_loop.plan_graph

    def plan_and_record(*given: Any, **headroom: int) -> PlannedGraph:
        planned = plan_graph(*given, **headroom)
        captured = planned.priced.captured
        again = capture(_copied(captured.joint), captured.num_fwd_outputs, fuses=True)
        records.append(Recorded(again, planned.plan.schedule))
        return planned

    return plan_and_record


def checkpointed(model: nn.Module) -> bool:
    """Makes every block of the model's lists of blocks a checkpoint region. Returns True if there are any."""
    found = [child for name, module in model.named_modules() if name.split(".")[-1] in BLOCK_LISTS
             for child in module.children() if isinstance(module, (nn.ModuleList, nn.Sequential))]  # fmt: skip
    for block in found:
        forward = block.forward
        block.forward = lambda *a, forward=forward, **k: checkpoint(forward, *a, use_reentrant=False, **k)
    return bool(found)


class Bench:
    """All plans of one model: compiled one after another, then run in turn."""

    def __init__(self, name: str, planned_by: str) -> None:
        self.name, self.planned_by = name, planned_by
        self.steps: dict[str, Callable[[], None]] = {}
        self.records: dict[str, Recorded] = {}
        self.models: list[nn.Module] = []

    def rows(self, rounds: int) -> Iterator[Row]:
        """Yields one row for each plan that could be compiled, plain Inductor first."""
        self.add_torch("plain", 1.0)
        plain = self.records["plain"]
        peak = Plan.of(plain.captured.graph, plain.schedule).peak_bytes
        for budget in TORCH_BUDGETS:
            self.add_torch(f"torch {budget:g}", budget)
        self.add_torch("checkpoint", 1.0, blocks=True)
        budgets = {int(share * peak): f"autoremat {share:g}" for share in SHARES}
        for rival, measured in self.peaks().items():
            budgets.setdefault(measured, f"autoremat as {rival}")  # Dynamo compiles one budget once
        for budget, method in budgets.items():
            self.add_ours(method, budget)
        samples, peaks = in_turn(self.steps, rounds), self.peaks()
        seconds = {method: statistics.median(own) for method, own in samples.items()}
        first = self.predicted("plain")
        for method, step_seconds in seconds.items():
            overheads = {m: (p[1] - first[m][1]) / sum(first[m]) for m, p in self.predicted(method).items()}
            yield Row(self.name, method, step_seconds, peaks[method], step_seconds / seconds["plain"] - 1, overheads)

    def add_torch(self, method: str, budget: float, blocks: bool = False) -> None:
        model, inputs = build(self.name)
        if blocks and not checkpointed(model):
            return
        records: list[Recorded] = []
        with functorch_config.patch(activation_memory_budget=budget):
            self.add(method, model, inputs, records, options={"custom_partitioner_fn": TorchPartitioner(records)})

    def add_ours(self, method: str, budget: int) -> None:
        model, inputs = build(self.name)
        records: list[Recorded] = []
        options = {"memory_budget": budget, "cost_model": self.planned_by}
        try:
            with mock.patch.object(compile_loop, "plan_graph", recording(records)):
                self.add(method, model, inputs, records, backend="autoremat", options=options)
        except Exception as error:
            if find_cause(error, BudgetInfeasible) is None:
                raise
            print(f"{self.name}, {method}: infeasible", flush=True)

    def add(self, method: str, model: nn.Module, inputs: Any, records: list[Recorded], **keywords: Any) -> None:
        """Compiles by running a first step."""
        step = training_step(model, inputs, **keywords)
        with warnings.catch_warnings(), compilers.without_caches():
            warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
            step()
        # Replanning leaves several records; the last plan is the one that runs.
        self.steps[method], self.records[method] = step, records[-1]
        self.models.append(model)

    def peaks(self) -> dict[str, int]:
        """Returns the measured peak of each plan's step."""
        return {method: measured_peak(step, *self.models) for method, step in self.steps.items()}

    def predicted(self, method: str) -> dict[str, tuple[float, float]]:
        """Returns, by each cost model, the seconds of the step without recomputation and those of recomputation and saves."""
        record = self.records[method]
        found = {}
        for model in COST_MODELS:
            graph = capture(record.captured.joint, record.captured.num_fwd_outputs, fuses=True, prices=Prices(model)).graph
            found[model] = graph.step_seconds, Plan.of(graph, record.schedule).cost_seconds
        return found


def build(name: str) -> model_zoo.Built:
    torch.manual_seed(0)
    return model_zoo.MODELS[name]()


def cells(row: Row) -> dict[str, str]:
    overheads = {model: percent(row.predicted[model]) for model in COST_MODELS}
    step = {"peak, MiB": mebibytes(row.peak_bytes), "step, ms": f"{1e3 * row.step_seconds:.1f}"}
    return {"model": row.model, "plan": row.method, **step, "measured": percent(row.measured), **overheads}


def score(rows: list[Row], model: str) -> str:
    """Returns the errors of a cost model in words. Plain Inductor's own overhead is 0 by definition and has no error."""
    errors = [abs(row.predicted[model] - row.measured) for row in rows if row.method != "plain"]
    pairs = [
        (one, other)
        for one, other in itertools.combinations(rows, 2)
        if one.model == other.model and abs(one.step_seconds / other.step_seconds - 1) > RESOLVED
    ]
    right = sum((one.predicted[model] - other.predicted[model]) * (one.measured - other.measured) > 0 for one, other in pairs)
    ranked = f"{right / len(pairs):.0%}" if pairs else "-"
    return f"{model}: median error {statistics.median(errors):.1%} of the step, {ranked} of {len(pairs)} pairs ranked rightly"


def duels(rows: list[Row]) -> str:
    """Returns the seconds of the fastest of ours that needs no more memory, in steps of each plan that is not ours."""
    ours = [row for row in rows if row.method.startswith("autoremat")]
    rivals, ratios = [row for row in rows if row not in ours], []
    for rival in rivals:
        own = [row.step_seconds for row in ours if row.model == rival.model and row.peak_bytes <= rival.peak_bytes]
        ratios += [min(own) / rival.step_seconds] if own else []
    if not ratios:
        return "no plan of ours needs as little memory as another's"
    return (
        f"against {len(rivals)} plans of others, ours at the same or a lower measured peak: {len(ratios)} have one; step "
        f"{statistics.geometric_mean(ratios):.3f} x in the geometric mean, {min(ratios):.3f} to {max(ratios):.3f}"
    )


def shown(rows: list[Row]) -> list[Table | str]:
    title = "Overhead over plain Inductor, % of its step"
    return [table(title, list(map(cells, rows))), *(score(rows, model) for model in COST_MODELS), duels(rows)]


def measure(planned_by: str, rounds: int, name: str) -> Iterator[Row]:
    torch._dynamo.reset()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield from Bench(name, planned_by).rows(rounds)


def main() -> None:
    made = parser(__doc__, MODELS)
    made.add_argument("--planned-by", choices=COST_MODELS, default="roofline", help="the cost model of autoremat's plans")
    made.add_argument("--rounds", type=int, default=15)
    arguments = made.parse_args()
    for constant, size in SIZES.items():
        setattr(model_zoo, constant, size)
    dynamo_config.recompile_limit = dynamo_config.accumulated_recompile_limit = 10_000  # one code object for all plans
    setup = {"threads": torch.get_num_threads(), "rounds": arguments.rounds, "planned by": arguments.planned_by, "sizes": SIZES}
    run("costs", arguments, Row, partial(measure, arguments.planned_by, arguments.rounds), shown, **setup)


if __name__ == "__main__":
    main()
