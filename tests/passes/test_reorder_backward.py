"""The backward in another sequence than it was traced in: the same bits, at the peak that was planned."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from oracles import Outcome, differences, measured_step, train_step
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import autoremat
from autoremat import Plan
from autoremat.basics.errors import PlanInvalid
from autoremat.capture.capture import Capture, capture
from autoremat.passes.reorder_backward import reorder_backward
from autoremat.planner.graph.op import Kind
from autoremat.planner.graph.schedule import Schedule, build_schedule
from autoremat.planner.search.gradients_first import with_gradients_first
from autoremat.torch_private import fake_tensors, joint_graphs


class Block(nn.Module):
    """A wide layer between two narrow ones. The backward reads what is behind the GELU only for the gradient of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 512), nn.Linear(512, 32)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.narrow(F.gelu(self.wide(x))).square().mean(),)


@functools.cache
def block() -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block(), torch.randn(256, 32)


def compiled(**options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(block()[0], backend="autoremat", options={"cost_model": "roofline", **options})


def plans(compiler: str) -> tuple[Plan, Plan]:
    """The plan of the step that saves all, and the same with the gradients of weights first."""
    model, x = block()
    options = {"compiler": compiler, "cost_model": "roofline", "memory_budget": 1.0}
    graph = autoremat.explain(model, x, lower=False, options=options).plan.graph
    whole = Plan.of(graph, build_schedule(graph, graph.backward_needs))
    return whole, Plan.of(graph, with_gradients_first(graph, whole.schedule))


def checked(plan: Plan, compiler: str) -> tuple[Outcome, int]:
    """What a step under the plan leaves behind, and its measured peak, which is at most the simulated one."""
    model, x = block()
    step = compiled(compiler=compiler, plan=plan)
    found, peak = train_step(step, model, [x]), measured_step(step, model, [x])
    assert autoremat.reports()[-1].plan.schedule == plan.schedule
    assert peak <= plan.peak_bytes
    return found, peak


def test_gradients_that_come_first_have_the_same_bits_at_a_lower_peak():
    whole, reordered = plans("aot_eager")
    assert not reordered.schedule.keeps_sequence(reordered.graph)
    (expected, before), (found, after) = checked(whole, "aot_eager"), checked(reordered, "aot_eager")
    assert not differences(found, expected)
    assert after < before


@pytest.mark.slow
def test_inductor_keeps_the_sequence_of_the_plan():
    (model, x), (whole, reordered) = block(), plans("inductor")
    found, peak = checked(reordered, "inductor")
    assert peak < whole.peak_bytes
    for name, tensor in train_step(model, model, [x]).tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor)


class Layers(nn.Module):
    """Wide layers with a GELU between narrow ones. Under `BUDGET`, the plan computes activations again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layers(x).square().mean(),)


BUDGET = {"cost_model": "roofline", "memory_budget": 0.8}


def kernels(plan: Plan) -> list[list[str]]:
    """The ops of the backward from which the model's GELUs and their gradients came, in one list for each fusion group."""
    groups: list[list[str]] = [[]]
    for index in plan.schedule.backward:
        op = plan.graph.ops[index]
        if op.kind is Kind.EXTERN:
            groups.append([])
        elif "gelu" in op.decomposed_from and op.decomposed_from not in groups[-1]:
            groups[-1].append(op.decomposed_from)
    return [group for group in groups if group]


def test_a_repeated_activation_is_in_the_fusion_group_of_its_gradient():
    """Without Inductor nothing is fused, and the backward stays as autograd traced it."""
    model, x = Layers(), torch.randn(256, 128)
    plan = autoremat.explain(model, x, lower=False, options=BUDGET).plan
    assert kernels(plan).count(["aten.gelu.default", "aten.gelu_backward.default"]) > 1
    assert ["aten.gelu.default"] not in kernels(plan)
    alone = autoremat.explain(model, x, lower=False, options=BUDGET | {"compiler": "aot_eager"}).plan
    assert alone.schedule.keeps_sequence(alone.graph)


@pytest.mark.slow
def test_inductor_runs_gradients_later_at_the_planned_peak():
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(256, 128)
    torch._dynamo.reset()
    step = torch.compile(model, backend="autoremat", options=BUDGET)
    found, peak = train_step(step, model, [x]), measured_step(step, model, [x])
    plan = autoremat.reports()[-1].plan
    assert not plan.schedule.keeps_sequence(plan.graph)
    assert peak <= plan.peak_bytes
    for name, tensor in train_step(model, model, [x]).tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor)


def captured() -> tuple[Capture, Schedule]:
    """The joint graph of the block as captured, and the schedule that saves all."""
    found: list[Capture] = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
        number = keywords["num_fwd_outputs"]
        copy = fake_tensors.copied_module(joint)
        found.append(capture(joint_graphs.prepare_joint(copy, number), number, fuses=False))
        return joint_graphs.partition_as_torch_does(joint, joint_inputs, **keywords)

    model, x = block()
    torch._dynamo.reset()
    torch.compile(model, backend=aot_autograd(fw_compiler=lambda module, _: module.forward, partition_fn=partition))(x)
    return found[0], build_schedule(found[0].graph, found[0].graph.backward_needs)


def test_helpers_move_with_the_op_that_reads_them():
    found, traced = captured()
    schedule = with_gradients_first(found.graph, traced)
    assert reorder_backward(found.joint, found, traced) == 0
    moved = reorder_backward(found.joint, found, schedule)
    found.joint.graph.lint()
    place = {node: number for number, node in enumerate(found.joint.graph.nodes)}
    ran = [place[found.op_nodes[index]] for index in schedule.own(found.graph)]
    assert moved > 0
    assert ran == sorted(ran)


def test_an_op_before_what_it_reads_is_refused():
    found, schedule = captured()
    backwards = Schedule(schedule.forward, schedule.backward[::-1])
    with pytest.raises(PlanInvalid, match="the schedule runs an op before .*, which it reads"):
        reorder_backward(found.joint, found, backwards)
