"""Gradients of weights behind the fusible ops that follow them: what moves, what stays, and which fusion groups result."""

from __future__ import annotations

import pytest
import torch
from oracles import train_step
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import autoremat
from autoremat import Graph
from autoremat.passes.pipeline import run_passes
from autoremat.passes.postpone_gradients import postpone_gradients

aten = torch.ops.aten
SIDE = 8


def postponed(write: object, *arguments: str) -> tuple[list[str], int]:
    """The names of the calls of a graph behind the pass, and the number of gradients that it has moved."""
    graph = fx.Graph()
    read = {name: graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1")}
    for node in read.values():
        node.meta["val"] = torch.empty(SIDE, SIDE, device="meta")

    def call(name: str, target: object, *operands: object) -> fx.Node:
        node = graph.create_node("call_function", target, operands, {}, name)
        node.meta["val"] = target(*tree_map_only(fx.Node, lambda n: n.meta["val"], operands))
        return node

    graph.output(write(call, *read.values()))
    module = fx.GraphModule(nn.Module(), graph)

    def run(joint: fx.GraphModule) -> int:
        return postpone_gradients(joint, "cpu")

    (found,) = run_passes(module, run)
    return [node.name for node in module.graph.nodes if node.op == "call_function"], found.rewrites


def test_a_gradient_runs_behind_the_fusible_ops_with_its_view():
    def write(call, x, w, dy):
        dw = call("dw", aten.mm.default, x, dy)
        view = call("view", aten.view.default, dw, [SIDE * SIDE])
        dh = call("dh", aten.sigmoid.default, dy)
        twice = call("twice", aten.mul.Tensor, dh, dh)
        return [view, call("dx", aten.mm.default, twice, w)]

    assert postponed(write) == (["dh", "twice", "dw", "view", "dx"], 1)


def test_gradients_keep_their_sequence_up_to_the_end():
    def write(call, x, w, dy):
        first = call("first", aten.mm.default, x, dy)
        one = call("one", aten.sigmoid.default, dy)
        second = call("second", aten.mm.default, w, dy)
        two = call("two", aten.mul.Tensor, one, dy)
        return [first, second, two]

    assert postponed(write) == (["one", "two", "first", "second"], 2)


def test_a_gradient_that_is_read_stays():
    def write(call, x, w, dy):
        dw = call("dw", aten.mm.default, x, dy)
        dh = call("dh", aten.sigmoid.default, dy)
        return [call("norm", aten.mul.Tensor, dw, dw), call("dx", aten.mm.default, dh, w)]

    assert postponed(write) == (["dw", "dh", "norm", "dx"], 0)


def test_a_result_of_the_forward_stays():
    def write(call, x, w, dy):
        y = call("y", aten.mm.default, x, w)
        return [y, call("loss", aten.sigmoid.default, x), call("dx", aten.mm.default, dy, w)]

    assert postponed(write) == (["y", "loss", "dx"], 0)


@pytest.mark.parametrize("between", [aten.mm.default, aten.bernoulli.default], ids=["product", "random"])
def test_no_gradient_passes_an_extern_kernel_that_is_read_or_a_random_draw(between):
    def write(call, x, w, dy):
        dw = call("dw", aten.mm.default, x, dy)
        held = call("between", between, dy, *([w] if between is aten.mm.default else []))
        return [dw, call("dh", aten.sigmoid.default, held)]

    assert postponed(write) == (["dw", "between", "dh"], 0)


class Layers(nn.Module):
    """Two linear layers with a GELU between them, which a plan computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(x))).square().mean()


def activations(graph: Graph) -> set[int]:
    """The results of the GELU, without what it is computed from."""
    made = {value for op in graph.ops if op.decomposed_from == "aten.gelu.default" for value in op.outputs}
    return {value for value in made if any(graph.ops[r].target == "aten.addmm.default" for r in graph.readers[value])}


def test_a_repeated_activation_is_in_the_fusion_group_of_its_gradient():
    """Without Inductor nothing is fused, and the backward stays as autograd traced it."""
    model, x = Layers(), torch.randn(128, 32)
    found = {}
    for compiler in ("inductor", "aot_eager"):
        options = {"compiler": compiler, "cost_model": "roofline", "recompute": ["*gelu*"]}
        graph = autoremat.explain(model, x, lower=False, options=options).plan.graph
        (of_weight,) = (i for i, op in enumerate(graph.ops) if not op.forward and activations(graph).intersection(op.inputs))
        gradients = [i for i, op in enumerate(graph.ops) if op.decomposed_from == "aten.gelu_backward.default"]
        found[compiler] = of_weight > max(gradients)
    assert found == {"inductor": True, "aot_eager": False}


@pytest.mark.slow
def test_steps_of_both_sequences_have_the_same_gradients():
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(128, 32, requires_grad=True)
    step = torch.compile(model, backend="autoremat", options={"cost_model": "roofline", "recompute": ["*gelu*"]})
    expected, found = train_step(model, model, [x]), train_step(step, model, [x])
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor)
