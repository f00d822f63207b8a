"""The contract of passes: each runs in the pipeline, which lints, times and prints, and names the pass that breaks a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoremat.basics.environment import VERIFY_PASSES
from autoremat.passes import run_passes

aten = torch.ops.aten


def draws_twice(x: Tensor) -> Tensor:
    return torch.relu(torch.rand_like(x) + torch.randn_like(x)) * x


def traced() -> fx.GraphModule:
    return make_fx(draws_twice, tracing_mode="fake")(torch.ones(4, 4))


def call_of(module: fx.GraphModule, target: object) -> fx.Node:
    (node,) = module.graph.find_nodes(op="call_function", target=target)
    return node


def squares_the_result(module: fx.GraphModule) -> int:
    product = call_of(module, aten.mul.Tensor)
    product.args = (product.args[0], product.args[0])
    return 1


def reads_a_later_node(module: fx.GraphModule) -> int:
    call_of(module, aten.relu.default).args = (call_of(module, aten.mul.Tensor),)
    return 1


def draws_in_another_sequence(module: fx.GraphModule) -> int:
    call_of(module, aten.rand_like.default).prepend(call_of(module, aten.randn_like.default))
    return 1


def draws_once(module: fx.GraphModule) -> int:
    call_of(module, aten.randn_like.default).replace_all_uses_with(call_of(module, aten.rand_like.default))
    module.graph.erase_node(call_of(module, aten.randn_like.default))
    return 1


def returns_half_precision(module: fx.GraphModule) -> int:
    (output,) = module.graph.find_nodes(op="output")
    with module.graph.inserting_before(output):
        half = module.graph.call_function(torch.ops.prims.convert_element_type.default, (output.args[0], torch.float16))
    half.meta["val"] = output.args[0].meta["val"].half()
    output.args = (half,)
    return 1


def renames_an_input(module: fx.GraphModule) -> int:
    (node,) = module.graph.find_nodes(op="placeholder")
    node.name = "renamed"
    return 1


def test_a_pass_that_keeps_the_contract_runs_and_the_module_has_its_code():
    module = traced()
    assert run_passes(module, squares_the_result) == [1]
    assert (module(-torch.ones(4, 4)) >= 0).all()


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (reads_a_later_node, "leaves a malformed graph"),
        (draws_in_another_sequence, "changes the effects of the graph: randn_like"),
        (returns_half_precision, "changes the outputs of the graph: torch.float16"),
        (renames_an_input, "changes the inputs of the graph: renamed"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(broken: Callable[[fx.GraphModule], int], what: str):
    with pytest.raises(RuntimeError, match=f"the pass {broken.__name__} {what}"):
        run_passes(traced(), squares_the_result, broken)


def test_without_the_variable_only_the_form_of_the_graph_is_checked(monkeypatch):
    monkeypatch.delenv(VERIFY_PASSES)
    run_passes(traced(), draws_once)
    with pytest.raises(RuntimeError, match="the pass reads_a_later_node leaves"):
        run_passes(traced(), reads_a_later_node)


def test_seconds_and_graphs_are_logged_for_developers(caplog):
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))))
    options = {"memory_budget": 0.7, "compiler": "aot_eager"}
    with caplog.at_level(logging.DEBUG, logger="autoremat.passes"):
        torch.compile(model, backend="autoremat", options=options)(torch.randn(1024, 8)).sum().backward()
    lines = [record.getMessage() for record in caplog.records if record.name == "autoremat.passes"]
    timed = [line.split(":")[0] for line in lines if line.endswith(" ms")]
    assert timed == ["forward_region_operands", "ignore_running_averages", "insert_recomputation"]
    (graph,) = [line for line in lines if line.startswith("the graph after insert_recomputation:\n")]
    assert "gelu_recompute" in graph
