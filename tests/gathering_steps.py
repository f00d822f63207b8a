"""Steps that gather shards of their weights, and what runs, measures and explains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from sharded_models import Sharded
from torch import Tensor
from torch.profiler import profile

import autoremat
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.options.options import Options
from autoremat.report.report import Report
from autoremat.tools.explain import previews

collectives = torch.ops._c10d_functional
NAMESPACE = "_c10d_functional"
GATHER, COALESCED = f"{NAMESPACE}.all_gather_into_tensor.default", f"{NAMESPACE}.all_gather_into_tensor_coalesced.default"
EAGER: dict[str, Any] = {"compiler": "aot_eager", "cost_model": "roofline", "on_planning_error": "raise"}
LEAST = EAGER | {"memory_budget": 1, "on_infeasible": "best_effort"}
FAST: dict[str, Any] = {"interconnect_bandwidth": 1e12, "interconnect_latency": 1e-9}
WIDTH, LAYERS, ROWS = 64, 4, 16
MANY_ROWS = 128
"""So many that the peak lies where the backward begins, not at the last gradient, on processors of all kinds."""

Step = Callable[..., Tensor]

IGNORED_WARNINGS = [
    pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
]
"""Warnings of the steps that their tests do not look at."""


def sharded_step(x: Tensor, *shards: Tensor) -> Tensor:
    """A chain of layers, each with a weight that is gathered in 16 bits."""
    gather = Sharded(torch.bfloat16)
    for shard in shards:
        x = torch.tanh(x.bfloat16() @ gather(shard))
    return x.float().square().mean()


def coalesced_step(x: Tensor, *shards: Tensor) -> Tensor:
    """The same, with two weights per gather."""
    for first, second in zip(shards[::2], shards[1::2], strict=True):
        for weight in GatherTwo.apply(first, second):
            x = torch.tanh(x @ weight)
    return x.square().mean()


class GatherTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *shards: Tensor) -> tuple[Tensor, ...]:
        gathered = collectives.all_gather_into_tensor_coalesced(
            list(shards), dist.get_world_size(), dist.group.WORLD.group_name
        )
        return tuple(map(collectives.wait_tensor, gathered))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(functional.reduce_scatter_tensor(g.contiguous(), "sum", 0, dist.group.WORLD) for g in gradients)


def inputs(ranks: int, layers: int = LAYERS, seed: int = 0, rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, WIDTH), *[(WIDTH // ranks, WIDTH)] * layers]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def run(step: Step, tensors: list[Tensor], **arguments: Any) -> tuple[list[Tensor], list[str]]:
    """The gradients of a compiled step, and the collectives in the order in which they ran."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, **arguments)
    for _ in range(2):  # the first step is compiled
        for tensor in tensors:
            tensor.grad = None
        with profile() as ran:
            compiled(*tensors).backward()
    names = [event.name for event in ran.events() if event.name.startswith(NAMESPACE)]
    return [tensor.grad for tensor in tensors if tensor.grad is not None], names


def planned_calls(report: Report) -> list[str]:
    """The collectives of the plan in its sequence, as they show up in a profile, each with its waits."""
    assert report.plan is not None
    graph, found = report.plan.graph, []
    for index in report.plan.schedule.sequence:
        op = graph.ops[index]
        if op.target.startswith(NAMESPACE):
            found += [op.target.replace(".default", "").replace(".", "::"), *[f"{NAMESPACE}::wait_tensor"] * len(op.outputs)]
    return found


def again(report: Report) -> list[str]:
    """The targets of the collectives that the plan repeats."""
    assert report.plan is not None
    targets = (report.plan.graph.ops[index].target for index in report.plan.recomputed)
    return [target for target in targets if target.startswith(NAMESPACE)]


def explained(step: Step, *tensors: Tensor, **options: Any) -> Report:
    return autoremat.explain(step, *tensors, options=EAGER | options)


def captured(step: Step, *tensors: Tensor, **options: Any) -> PricedGraph:
    (found,), _ = previews(step, tensors, {}, Options(**EAGER | options), None, lambda preview: preview.priced)
    return found


def measured_peaks(compiled: Step, tensors: list[Tensor], steps: int) -> list[int]:
    """The peak of each of so many steps."""
    peaks = []
    for _ in range(steps):
        for tensor in tensors:
            tensor.grad = None
        with autoremat.track_peak() as tracked:
            compiled(*tensors).backward()
        peaks.append(tracked.bytes)
    return peaks
