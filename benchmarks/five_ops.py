"""The five-op graph of `DESIGN.md`, taken through all stages of a compilation. Prints the page's figures.

    python benchmarks/five_ops.py

The seconds are those of one core by data sheet, so the figures of the first five stages are the same on every machine.
`tests/project/test_design.py` compares them with the page.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

import autoremat
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.compiler.lowering import rewrite
from autoremat.compiler.planned_graph import PlannedGraph
from autoremat.compiler.planning import plan_graph
from autoremat.compiler.reference import plan_without_us
from autoremat.options.options import Options
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner
from autoremat.tools.explain import previews
from autoremat.torch_private import compilers, inductor_lowering

OPTIONS = {"memory_budget": 0.85, "cost_model": "roofline"}

VIEWS = (torch.ops.aten.permute.default, torch.ops.aten.expand.default)

INPUTS = {"primals_1": "w1", "primals_2": "x", "primals_3": "w2", "primals_4": "w3", "tangents_1": "tangent"}
"""Names of the step's inputs on the page."""


def five_ops() -> nn.Sequential:
    """Returns the model: three products, and a tanh behind the second one. Its mean is the fifth op."""
    return nn.Sequential(
        nn.Linear(16, 64, bias=False), nn.Linear(64, 128, bias=False), nn.Tanh(), nn.Linear(128, 8, bias=False)
    )


def batch() -> torch.Tensor:
    """Returns the input of the step."""
    return torch.randn(8192, 16)


@dataclass(frozen=True)
class Stages:
    """The results of the stages *prepare* to *rewrite*."""

    joint: torch.fx.Graph
    planned: PlannedGraph
    torchs: Plan
    """Torch's own partition."""
    halves: tuple[list[str], list[str]]
    """The calls of the forward and of the backward, without views."""
    saved: list[str]
    """The tensors that the forward returns for the backward, without its inputs."""


def stages() -> Stages:
    """Returns the results of the first five stages, without a run and without generated code."""
    model = five_ops()

    def look(priced: PricedGraph) -> Stages:
        joint = copy.deepcopy(priced.joint.module.graph)  # rewriting consumes it
        planned = plan_graph(priced)
        _, torchs = plan_without_us(priced, planned.planner)
        (forward, backward), _ = rewrite(planned)
        (returned,) = forward.graph.find_nodes(op="output")
        saved = [node.name for node in returned.args[0] if node is not None and node.op == "call_function"]
        return Stages(joint, planned, torchs, (calls(forward), calls(backward)), saved[1:])

    options = Options.parse(OPTIONS, None, compilers.inductor_config_names)
    ((found, *_), _) = previews(lambda x: model(x).mean(), (batch(),), {}, options, None, look)
    assert found is not None
    return found


def calls(half: torch.fx.GraphModule) -> list[str]:
    """Returns the names of the calls of one half that are no views."""
    return [node.name for node in half.graph.nodes if node.op == "call_function" and node.target not in VIEWS]


def execution_rows(found: Stages) -> Iterator[str]:
    """The table of executions: what *capture*, *price* and *plan* know about each."""
    fastest, within = found.planned.fastest, found.planned.plan
    assert fastest is not None
    sides, graph, seen = [_timeline(plan) for plan in (fastest, within)], within.graph, set()
    yield "| Execution | Reads | Kind | Bytes | Time, µs | Live bytes, fastest plan | Live bytes, plan within the budget |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for number in within.sequence:
        op = graph.ops[number]
        name = f"{op.name}_recompute" if number in seen else op.name
        seen.add(number)
        reads = ", ".join(_name(graph.values[value].name) for value in op.inputs)
        size = sum(graph.values[value].bytes for value in op.outputs)
        live = [f"{side[name]:,}" if name in side else "" for side in sides]
        yield f"| `{name}` | {reads} | {op.kind.value} | {size:,} | {op.seconds * 1e6:,.0f} | {live[0]} | {live[1]} |"


def _name(value: str) -> str:
    return f"`{INPUTS.get(value, value)}`"


def _timeline(plan: Plan) -> dict[str, int]:
    """Returns the live bytes by the names of executions. A second one has the name of its clone."""
    found: dict[str, int] = {}
    for op, size in zip(plan.sequence, plan.timeline.bytes_at, strict=True):
        name = plan.graph.ops[op].name
        found[f"{name}_recompute" if name in found else name] = int(size)
    return found


def plan_rows(found: Stages) -> Iterator[str]:
    """The table of plans, with their peaks and costs."""
    planned = found.planned
    fastest = planned.fastest
    assert fastest is not None
    rows = {"torch's own partition": found.torchs, "fastest plan": fastest, "plan within the budget": planned.plan}
    yield "| Plan | Saves | Recomputes | Simulated peak | Cost, µs |"
    yield "|---|---|---|---:|---:|"
    for name, plan in rows.items():
        graph = plan.graph
        saved = ", ".join(_name(graph.values[value].name) for value in sorted(plan.saved))
        again = ", ".join(_name(graph.ops[op].name) for op in sorted(plan.recomputed)) or "nothing"
        yield f"| {name} | {saved} | {again} | {plan.peak_bytes:,} | {plan.cost_seconds * 1e6:,.0f} |"


def figures(found: Stages) -> Iterator[str]:
    """The single figures of the first five stages, as the page states them."""
    planned, graph = found.planned, found.planned.priced.graph
    assert isinstance(planned.planner, Planner)
    assert planned.report.budget_bytes is not None
    forward = sum(op.forward for op in graph.ops)
    inputs, views = len(found.joint.find_nodes(op="placeholder")), sum(node.target in VIEWS for node in found.joint.nodes)
    yield f"{len(found.joint.nodes)} nodes, of which {inputs} are inputs and {views} are views"
    yield f"{forward} ops of the forward and {len(graph.ops) - forward} ops of the backward"
    yield f"{len(graph.values)} values"
    yield f"{graph.step_seconds * 1e3:.2f} ms"
    yield f"{len(planned.planner.plans)} starts"
    yield f"{planned.budget.code_headroom_bytes:,} bytes"
    yield f"{planned.report.reference_bytes:,} bytes"
    yield f"{planned.report.budget_bytes:,} bytes"
    yield f"{planned.report.budget_bytes - planned.budget.code_headroom_bytes:,} bytes"
    yield f"{planned.plan.gap:.1%} of the step's time".replace("%", " %")
    for half in found.halves:
        yield " ".join(half)
    yield f"saves {', '.join(found.saved)}"


@dataclass(frozen=True)
class Code:
    """The results of the last three stages, and measured peaks."""

    report: autoremat.Report
    estimates: dict[bool, int]
    """Peaks of the halves by Inductor's own estimate."""
    replayed: dict[bool, int]
    """Peaks of the halves by the replay of their code."""
    measured_bytes: int
    plain_bytes: int
    """Measured peak of Inductor without this package."""


def code() -> Code:
    """Returns the peaks of the generated code, and those of two steps that run."""
    model, x = five_ops(), batch()
    estimates: dict[bool, int] = {}
    replayed: dict[bool, int] = {}
    original = inductor_lowering._lowered_peak

    def lowered_peak(lowering: Any, source: str, known: Any) -> Any:
        held = {name for name in lowering.graph_inputs if name.startswith("tangents")}
        with torch._inductor.virtualized.V.set_graph_handler(lowering):
            estimates[lowering.is_backward] = inductor_lowering._scheduled_peak(lowering, held)
        half = original(lowering, source, known)
        replayed[lowering.is_backward] = half.peak_bytes
        return half

    def step(compiled: Any) -> int:
        for _ in range(2):  # the first step compiles
            model.zero_grad(set_to_none=True)
            with autoremat.track_peak() as peak:
                compiled(x).backward()
        return peak.bytes

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).mean()

    with mock.patch.object(inductor_lowering, "_lowered_peak", lowered_peak):
        measured = step(torch.compile(loss, backend="autoremat", options=OPTIONS))
    report = autoremat.reports()[-1]
    torch._dynamo.reset()
    return Code(report, estimates, replayed, measured, step(torch.compile(loss)))


def code_figures(found: Code) -> Iterator[str]:
    """The figures of the last three stages, as the page states them."""
    budget = found.report.budget_bytes
    assert budget is not None
    yield f"{found.report.peak_bytes:,} bytes"
    yield f"{(budget - found.report.peak_bytes) / budget:.1%} of the budget".replace("%", " %")
    yield f"{found.measured_bytes:,} bytes"
    yield f"{found.plain_bytes:,} bytes"
    yield f"{max(found.estimates.values()):,} bytes"


def main() -> None:
    """Prints the tables and figures of the page."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = stages()
    for rows in (execution_rows, plan_rows, figures):
        print(*rows(found), sep="\n", end="\n\n")
    generated = code()
    print(*code_figures(generated), sep="\n", end="\n\n")
    print(f"replay {generated.replayed}, Inductor's estimate {generated.estimates}", end="\n\n")
    print(generated.report)


if __name__ == "__main__":
    main()
