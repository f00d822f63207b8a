"""The predicted cost of recomputation by each cost model against measured steps, and our steps against those of torch's plans.

    python benchmarks/costs.py            # all models, an hour or more on an idle machine
    python benchmarks/costs.py --quick    # two small models and few plans

Plans are autoremat's at several budgets, torch's at several values of `activation_memory_budget`, those of per-block
checkpointing, and autoremat's at the measured peaks of these. Each is compiled by Inductor and priced by every cost model on
the joint graph that it was made for. Overheads are beside plain Inductor on the same model, in shares of its step. They are
predicted from recomputation and saves. They are measured as medians of steps that all plans of the model take in turn. Each
plan that is not ours, plain Inductor's among them, meets the fastest of ours whose measured peak is no higher. Only an idle
machine gives figures worth keeping. Rows of models that are not asked for stay, if they were measured in the same way.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import model_zoo
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from cost_scores import Row, Score, duels, scores, summary_of
from model_zoo import MODELS, Built
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.basics.errors import BudgetInfeasible
from autoremat.capture.capture import Capture, capture
from autoremat.capture.pricing import priced
from autoremat.compiler import peers
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.compiler.planning import BudgetedGraph, EarlierSearches
from autoremat.compiler.torch_partition import schedule_of_partition
from autoremat.options.options import COST_MODELS
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.plans.plan import Plan
from autoremat.torch_private import compilers, joint_graphs

ROOT = Path(__file__).resolve().parent.parent
BLOCK_LISTS = ("h", "layers", "layer", "block", "blocks", "stages")
"""Names of the lists of repeated blocks in the models."""

WARM_ROUNDS = 2


@dataclass(frozen=True)
class Setting:
    """The models, budgets and rounds to run."""

    models: tuple[str, ...]
    shares: tuple[float, ...]
    torch_budgets: tuple[float, ...]
    rounds: int
    sizes: dict[str, int]
    """Constants of `model_zoo` to set: in its own sizes much of a step is the time of calls."""


FULL = Setting(
    ("gpt2-12", "llama-12", "bert-12", "t5-6", "vit-12", "resnet-18", "densenet", "unet"),
    (1.0, 0.8, 0.6, 0.5, 0.4), (0.8, 0.5, 0.2), 15, {"HIDDEN": 256, "BATCH": 4, "LENGTH": 256},
)  # fmt: skip
QUICK = Setting(("gpt2-4", "unet"), (0.7, 0.4), (0.5,), 5, {})


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


def recording(records: list[Recorded]) -> Callable[[PricedGraph, PlanningContext, EarlierSearches | None], BudgetedGraph]:
    """Returns `plan_graph`, extended to leave a record. The graph is copied, because it is rewritten afterwards."""
    plan_graph = peers.plan_graph

    def plan_and_record(priced: PricedGraph, context: PlanningContext, earlier: EarlierSearches | None) -> BudgetedGraph:
        planned = plan_graph(priced, context, earlier)
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


@dataclass
class Bench:
    """All plans of one model: compiled one after another, then run in turn."""

    name: str
    setting: Setting
    planned_by: str

    def __post_init__(self) -> None:
        self.steps: dict[str, Callable[[], None]] = {}
        self.records: dict[str, Recorded] = {}
        self.models: list[nn.Module] = []

    def rows(self) -> list[Row]:
        """Returns one row for each plan that could be compiled, plain Inductor first."""
        self.add_torch("plain", 1.0)
        peak = self.peak_of("plain")
        for budget in self.setting.torch_budgets:
            self.add_torch(f"torch {budget:g}", budget)
        self.add_torch("checkpoint", 1.0, blocks=True)
        budgets = {int(share * peak): f"autoremat {share:g}" for share in self.setting.shares}
        for rival, measured in self.peaks().items():
            budgets.setdefault(measured, f"autoremat as {rival}")  # Dynamo compiles one budget once
        for budget, method in budgets.items():
            self.add_ours(method, budget)
        seconds, peaks = self.measure(), self.peaks()
        plain = self.predicted("plain")
        return [
            Row(
                self.name, method, seconds[method], peaks[method], seconds[method] / seconds["plain"] - 1,
                {m: (p[1] - plain[m][1]) / sum(plain[m]) for m, p in self.predicted(method).items()},
            )
            for method in self.steps
        ]  # fmt: skip

    def peak_of(self, method: str) -> int:
        record = self.records[method]
        return Plan.of(record.captured.graph, record.schedule).peak_bytes

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
            with mock.patch.object(peers, "plan_graph", recording(records)):
                self.add(method, model, inputs, records, backend="autoremat", options=options)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, BudgetInfeasible):
                raise
            print(f"{self.name}, {method}: infeasible", flush=True)

    def add(self, method: str, model: nn.Module, inputs: Any, records: list[Recorded], **keywords: Any) -> None:
        """Compiles by running a first step."""
        compiled = torch.compile(model, **keywords)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            compiled(*inputs).backward()

        begin = time.perf_counter()
        with warnings.catch_warnings(), compilers.without_caches():
            warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
            step()
        print(f"{self.name}, {method}: compiled in {time.perf_counter() - begin:.1f} s", flush=True)
        # Replanning leaves several records; the last plan is the one that runs.
        self.steps[method], self.records[method] = step, records[-1]
        self.models.append(model)

    def measure(self) -> dict[str, float]:
        """Returns the median seconds of each plan's step, over rounds in which every plan takes one."""
        samples: dict[str, list[float]] = {method: [] for method in self.steps}
        for turn in range(WARM_ROUNDS + self.setting.rounds):
            for method, step in self.steps.items():
                begin = time.perf_counter()
                step()
                if turn >= WARM_ROUNDS:
                    samples[method].append(time.perf_counter() - begin)
        return {method: statistics.median(seconds) for method, seconds in samples.items()}

    def peaks(self) -> dict[str, int]:
        """Returns the measured peak of each plan's step."""
        found = {}
        for method, step in self.steps.items():
            self.forget_gradients()
            with autoremat.track_peak("cpu") as peak:
                step()
            found[method] = peak.bytes
        return found

    def forget_gradients(self) -> None:
        for model in self.models:
            model.zero_grad(set_to_none=True)

    def predicted(self, method: str) -> dict[str, tuple[float, float]]:
        """Returns, by each cost model, the seconds of the step without recomputation and those of recomputation and saves."""
        record = self.records[method]
        found = {}
        for model in COST_MODELS:
            captured, _ = priced(record.captured, model)
            plan = Plan.of(captured.graph, record.schedule)
            found[model] = captured.graph.step_seconds, plan.cost_seconds
        return found


def build(name: str) -> Built:
    torch.manual_seed(0)
    return MODELS[name]()


def table_of(rows: list[Row]) -> Table:
    table = Table(title="Overhead over plain Inductor, % of its step")
    for column in ("model", "plan"):
        table.add_column(column, no_wrap=True)
    for column in ("peak, MiB", "step, ms", "measured", *COST_MODELS):
        table.add_column(column, justify="right")
    for row in rows:
        overheads = (row.measured, *(row.predicted[model] for model in COST_MODELS))
        peak, step = f"{row.peak_bytes / 2**20:.2f}", f"{1e3 * row.step_seconds:.1f}"
        table.add_row(row.model, row.method, peak, step, *(f"{100 * x:.1f}" for x in overheads))
    return table


def write(rows: list[Row], setup: dict[str, Any], folder: Path) -> None:
    """Writes costs.txt, costs.json and costs.png in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = scores(rows)
    with (folder / "costs.txt").open("w") as file:
        for console in (Console(width=120), Console(width=120, file=file)):
            console.print(", ".join(f"{key}: {value}" for key, value in setup.items()), highlight=False)
            console.print(table_of(rows))
            for model, score in found.items():
                ranked = "-" if score.ranked_rightly is None else f"{score.ranked_rightly:.0%}"
                text = f"median error {score.median_error:.1%} of the step, {ranked} of {score.pairs} pairs ranked rightly"
                console.print(f"{model}: {text}", highlight=False)
            console.print(summary_of(duels(rows)), highlight=False)
    record = setup | {"scores": {m: asdict(s) for m, s in found.items()}, "rows": [asdict(row) for row in rows]}
    (folder / "costs.json").write_text(json.dumps(record, indent=2) + "\n")
    draw(rows, found, folder / "costs.png")


def draw(rows: list[Row], found: dict[str, Score], path: Path) -> None:
    """Draws predicted against measured overhead, one panel for each cost model; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no matplotlib, no costs.png", file=sys.stderr)
        return
    figure = Figure(figsize=(4 * len(COST_MODELS), 4), layout="constrained")
    panels = figure.subplots(1, len(COST_MODELS), sharex=True, sharey=True)
    plans = [row for row in rows if row.method != "plain"]
    for panel, model in zip(panels, COST_MODELS, strict=True):
        for method, marker in (("autoremat", "o"), ("torch", "s"), ("checkpoint", "^")):
            shown = [row for row in plans if row.method.startswith(method)]
            panel.scatter(
                [100 * r.measured for r in shown], [100 * r.predicted[model] for r in shown], marker=marker, label=method
            )
        panel.axline((0, 0), slope=1, color="grey", linewidth=0.8)
        panel.set(title=f"{model}: median error {found[model].median_error:.1%}", xlabel="measured overhead, % of the step")
    panels[0].set_ylabel("predicted, % of the step")
    panels[0].legend()
    figure.savefig(path, dpi=120)


def known_rows(folder: Path, setup: dict[str, Any], asked_for: tuple[str, ...]) -> list[Row]:
    """Returns the rows of other models that an earlier run with the same setup has written."""
    path = folder / "costs.json"
    record = json.loads(path.read_text()) if path.exists() else {"rows": []}
    same = all(record.get(key) == value for key, value in setup.items())
    return [Row(**row) for row in record["rows"] if same and row["model"] not in asked_for]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", nargs="+", choices=list(MODELS))
    parser.add_argument("--planned-by", choices=COST_MODELS, default="roofline", help="the cost model of autoremat's plans")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    setting = QUICK if arguments.quick else FULL
    setting = replace(setting, models=tuple(arguments.models or setting.models))
    for constant, size in setting.sizes.items():
        setattr(model_zoo, constant, size)
    dynamo_config.recompile_limit = 10_000  # one code object is compiled once for each plan
    dynamo_config.accumulated_recompile_limit = 10_000
    setup = {"torch": torch.__version__, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
             "rounds": setting.rounds, "planned by": arguments.planned_by, "sizes": setting.sizes}  # fmt: skip
    rows = known_rows(arguments.output, setup, setting.models)
    for name in setting.models:
        torch._dynamo.reset()
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            rows += Bench(name, setting, arguments.planned_by).rows()
        write(rows, setup, arguments.output)


if __name__ == "__main__":
    main()
