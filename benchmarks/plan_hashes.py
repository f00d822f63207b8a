"""Hashes of plans, which show that a change of the code keeps the plans.

    python benchmarks/plan_hashes.py --check    # plans again; exits 1 and lists the rows that differ
    python benchmarks/plan_hashes.py            # plans for the stored budgets and stores what comes out
    python benchmarks/plan_hashes.py --fresh    # chooses the budgets anew
    python benchmarks/plan_hashes.py --check --only mlp moe

Twelve small models at six budgets, two thirds of the rows with Inductor's fusion. Models are planned for the CPU and for a
card by name in turns. Some rows are of graphs without torch, by each solver, and some of the code that Inductor generates.

Equal rows mean that the same ops run in the same order in each half. Costs are the roofline's, with one thread. On a CPU the
workspaces of some kernels are measured, so the stored rows hold for one type of processor and one torch.
"""

from __future__ import annotations

import os
import tempfile

os.environ["AUTOREMAT_CACHE_DIR"] = tempfile.mkdtemp()  # nothing that an earlier run has measured or planned is used
os.environ["AUTOREMAT_PROGRESS"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import hashlib
import json
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import model_zoo
import torch
from random_layered import WIDTHS, generate
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "benchmarks" / "results" / "plan_hashes.json"
TIME_LIMIT = 600.0
"""Seconds: more than any row takes, so that no plan depends on how busy the machine is."""

SOLVER_EFFORT = 4.0

BUDGETS = ("85 %", "60 %", "least", "95 %", "70 %", "45 %")
ABOVE_LEAST = 1.03
DEVICES = ("cpu", "A100-40GB")
INNERS = ("inductor", "inductor", "aot_eager")
SOLVERS = ("auto", "ilp", "min_cut")
LOWERED = ("mlp", "resnet", "gpt2")


class MLP(nn.Module):
    """Six layers with layer norms between, and a loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                  for _ in range(6))  # fmt: skip
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Experts(nn.Module):
    """A mixture of experts: each token goes through the two that its router likes best."""

    def __init__(self, width: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / 8)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        share = torch.zeros_like(self.router(x)).scatter(-1, chosen, weights)
        each = torch.einsum("teh,ehw->tew", F.silu(torch.einsum("tw,ewh->teh", x, self.up)), self.down)
        return x + (each * share.unsqueeze(-1)).sum(1)


class Loss(nn.Module):
    """The mean square of the result of some modules in sequence."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x).square().mean()


class Unrolled(nn.Module):
    """An LSTM cell over the rows of a sequence, step by step."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width, self.gates = width, nn.Linear(2 * width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], self.width)
        outputs = []
        for step in x.unbind(1):
            remember, write, read, new = self.gates(torch.cat([step, hidden], 1)).chunk(4, 1)
            cell = remember.sigmoid() * cell + write.sigmoid() * new.tanh()
            hidden = read.sigmoid() * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, 1).square().mean()


def densenet() -> model_zoo.Built:
    features = nn.Sequential(model_zoo.convolve(3, 16), model_zoo.DenseBlock(16, 8, 6))
    return model_zoo.Classifier(features, 64), model_zoo.images(16)


def decoder_with_dropout() -> model_zoo.Built:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    return Loss(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)), (torch.randn(4, 64, 64),)


MODELS: dict[str, Callable[[], model_zoo.Built]] = {
    "mlp": lambda: (MLP(), (torch.randn(256, 64),)),
    "moe": lambda: (Loss(Experts(), Experts()), (torch.randn(256, 64),)),
    "lstm": lambda: (Unrolled(), (torch.randn(16, 12, 32),)),
    "dropout": decoder_with_dropout,
    "gpt2": lambda: model_zoo.gpt2(2),
    "llama": lambda: model_zoo.llama(2),
    "bert": lambda: model_zoo.bert(2),
    "t5": lambda: model_zoo.t5(1),
    "vit": lambda: model_zoo.vit(2),
    "resnet": lambda: model_zoo.resnet("basic", [1, 1, 1, 1]),
    "densenet": densenet,
    "unet": lambda: (model_zoo.UNet((8, 16, 32)), model_zoo.images(32)),
}


@dataclass(frozen=True)
class Row:
    """One plan. Equal hashes of graphs and plans mean that the same ops run in the same order on the same values."""

    case: str
    budget_bytes: int
    peak_bytes: int
    cost_seconds: float
    added_seconds: float
    saved_bytes: int
    ops: int
    recomputed: int
    graph: str
    plan: str
    code_peak_bytes: int | None = None
    """Of the generated code, where there is any."""
    replans: int = 0


Make = Callable[[int | None], Row]
"""From a budget (None: it is chosen) to the plan's row."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the stored rows and store nothing")
    parser.add_argument("--fresh", action="store_true", help="choose the budgets anew")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="rows whose names begin so")
    parser.add_argument("--stored", type=Path, default=STORED)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autoremat.BudgetWarning)
    before = {row.case: row for row in read(arguments.stored)}
    after: dict[str, Row] = {}
    begun = time.monotonic()
    for case, make in rows():
        if case.startswith(tuple(arguments.only)):
            known = None if arguments.fresh else before.get(case)
            after[case] = make(known and known.budget_bytes)
            print(f"{time.monotonic() - begun:5.0f} s  {line(after[case])}", flush=True)
    shutil.rmtree(os.environ["AUTOREMAT_CACHE_DIR"], ignore_errors=True)
    if arguments.check:
        return compare({case: before[case] for case in before if case.startswith(tuple(arguments.only))}, after)
    write([*(before | after).values()], arguments.stored)
    return 0


def rows() -> Iterator[tuple[str, Make]]:
    """Yields the names of all rows, each with the function that makes it."""
    for number, (name, build) in enumerate(MODELS.items()):
        for place, budget in enumerate(BUDGETS):
            device, inner = DEVICES[number % 2], INNERS[(number + place) % 3]
            case = f"{name} {device} {inner} {budget}"
            yield case, lambda known, case=case, build=build: explained(case, build, known)
    for name in LOWERED:
        case = f"{name} cpu code least"
        yield case, lambda known, case=case, name=name: explained(case, MODELS[name], known, lower=True)
    for name, graph, share in (("layered", layered(), 0.9), ("chain", chain(), 0.45)):
        for solver in SOLVERS:
            case = f"{name} {solver}"
            yield case, lambda known, case=case, graph=graph, share=share: planned(case, graph, share, known)


def explained(case: str, build: Callable[[], model_zoo.Built], budget: int | None, lower: bool = False) -> Row:
    """Returns the plan of a model's training step as the backend makes it."""
    _, device, inner, wanted = case.split(" ", 3)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = build()
    options: dict[str, Any] = {
        "cost_model": "roofline",
        "compiler": "inductor" if lower else inner,
        "time_limit": TIME_LIMIT,
        "on_infeasible": "best_effort",  # without it, tight budgets are decided by the code
    }

    def explain(budget: int | float, lower: bool = False) -> autoremat.Report:
        return autoremat.explain(model, *inputs, device=device, lower=lower, options=options | {"memory_budget": budget})

    if budget is None:
        whole = explain(1.0)
        least = whole.minimum_peak_bytes + whole.code_headroom_bytes
        share = 0.0 if wanted == "least" else float(wanted.removesuffix(" %")) / 100
        budget = max(int(share * whole.baseline_peak_bytes), int(ABOVE_LEAST * least))
    report = explain(budget, lower)
    assert report.plan is not None
    row = row_of(case, budget, report.plan)
    return replace(row, code_peak_bytes=report.compiled_peak_bytes, replans=report.replans)


def layered() -> autoremat.Graph:
    """Returns a random layered graph of one phase."""
    drawn = generate(40, WIDTHS[100], seed=0)
    return autoremat.Graph.from_dag(drawn.seconds, drawn.sizes, drawn.edges)


def chain() -> autoremat.Graph:
    """Returns a training step of 24 layers. Each layer's gradient reads its input and the gradient that comes in."""
    count = 24
    edges = [(i, i + 1) for i in range(2 * count - 1)]
    edges += [(i, 2 * count - 1 - i) for i in range(count)]
    seconds = [1.0 + i % 3 for i in range(2 * count)]
    sizes = [1000 + 100 * (i % 7) for i in range(2 * count)]
    return autoremat.Graph.from_dag(seconds, sizes, edges, num_forward=count)


def planned(case: str, graph: autoremat.Graph, share: float, budget: int | None) -> Row:
    """Returns the plan of a graph by one solver.

    The solver's effort follows from its time limit, which the standing clock never reaches.
    """
    solver = case.split()[1]
    with mock.patch("time.monotonic", return_value=0.0):
        found = autoremat.plan(graph, share if budget is None else budget, solver=solver, time_limit=SOLVER_EFFORT)
    assert found.budget_bytes is not None
    return row_of(case, found.budget_bytes, found)


def row_of(case: str, budget: int, plan: autoremat.Plan) -> Row:
    """Returns the stable facts of a plan."""
    graph = plan.graph
    targets = [re.sub(r" at 0x[0-9a-fA-F]+", "", op.target).rpartition("autoremat.")[2] for op in graph.ops]
    sizes = [value.bytes for value in graph.values]
    ops = [
        (target, op.forward, op.inputs, op.outputs, f"{op.seconds:.9e}", op.workspace_bytes)
        for target, op in zip(targets, graph.ops, strict=True)
    ]
    halves = [[f"{index} {targets[index]}" for index in half] for half in (plan.schedule.forward, plan.schedule.backward)]
    return Row(
        case,
        budget,
        plan.peak_bytes,
        round_(plan.cost_seconds),
        round_(plan.added_seconds),
        plan.saved_bytes,
        len(graph.ops),
        len(plan.recomputed),
        digest([ops, sizes, graph.forward_outputs, graph.backward_outputs]),
        digest([halves, sorted(plan.saved)]),
    )


def round_(seconds: float) -> float:
    """Returns ``seconds`` with nine digits, so that the order of a sum does not show."""
    return float(f"{seconds:.9g}")


def digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def compare(before: dict[str, Row], after: dict[str, Row]) -> int:
    """Prints the rows that differ. Returns 1 if there are any, else 0."""
    differing = [case for case in {**before, **after} if before.get(case) != after.get(case)]
    for case in differing:
        for when, found in (("before", before.get(case)), ("after", after.get(case))):
            print(f"{when:>6}: {'no such row' if found is None else line(found)}")
    print(f"{len(differing)} of {len({**before, **after})} rows differ")
    return 1 if differing else 0


def line(row: Row) -> str:
    code = "" if row.code_peak_bytes is None else f"  code {row.code_peak_bytes:>9} B after {row.replans} replans"
    return (
        f"{row.case:<32} budget {row.budget_bytes:>9} B  peak {row.peak_bytes:>9} B  cost {row.cost_seconds:.6e} s  "
        f"recomputed {row.recomputed:>3} of {row.ops:>4}  graph {row.graph}  plan {row.plan}{code}"
    )


def read(path: Path) -> list[Row]:
    return [Row(**entry) for entry in json.loads(path.read_text())["rows"]] if path.exists() else []


def write(found: list[Row], path: Path) -> None:
    """Writes the rows as JSON, and beside it as text."""
    setup = {"torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability()}
    path.write_text(json.dumps(setup | {"rows": [asdict(row) for row in found]}, indent=1) + "\n")
    head = ", ".join(f"{name}: {value}" for name, value in setup.items())
    path.with_suffix(".txt").write_text("\n".join([head, *map(line, found)]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
