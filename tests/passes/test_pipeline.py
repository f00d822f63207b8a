"""The contract of passes, which the pipeline checks; batch norms that run again move averages once; rows that inputs have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import same_bits
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from trained_steps import LEAST

import autoremat
from autoremat.passes import run_passes
from autoremat.passes.rows.row_partition import Region
from autoremat.passes.rows.run_by_parts import _Rewriting

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


CHANNELS = 8


class Stages(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], checkpoints: bool = False, shares: bool = False) -> None:
        super().__init__()
        norms = [norm() for _ in range(6)]
        if shares:
            norms = [norms[0]] * 6
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), norms[i], nn.ReLU(),
                nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), norms[i + 3],
            )
            for i in range(3)
        )  # fmt: skip
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            inside: Any = checkpoint(stage, x, use_reentrant=False) if self.checkpoints else stage(x)
            x = torch.relu(x + inside)
        return x.square().mean()


class ReadsAverages(Stages):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.stages[0][1].running_mean.square().sum()


class InFloats(nn.BatchNorm2d):
    """Stays in 32 bits in a model of 16."""

    def _apply(self, *_: Any) -> nn.Module:
        return self


NORMS: dict[str, tuple[Callable[[], Stages], float]] = {
    "plain": (lambda: Stages(lambda: nn.BatchNorm2d(CHANNELS)), 0.6),
    "in checkpoints": (lambda: Stages(lambda: nn.BatchNorm2d(CHANNELS), checkpoints=True), 0.9),
    "no weight": (lambda: Stages(lambda: nn.BatchNorm2d(CHANNELS, affine=False)), 1.0),
    "no averages": (lambda: Stages(lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False)), 1.0),
    "one for all": (lambda: Stages(lambda: nn.BatchNorm2d(CHANNELS), shares=True), 1.0),
    "averages are read": (lambda: ReadsAverages(lambda: nn.BatchNorm2d(CHANNELS)), 1.0),
    "another type": (lambda: Stages(lambda: InFloats(CHANNELS)).bfloat16(), 1.0),
    "another type, no weight": (lambda: Stages(lambda: InFloats(CHANNELS, affine=False)).bfloat16(), 1.0),
}
"""Each with the most that its least peak may be of the plain one."""


@pytest.mark.filterwarnings("ignore::autoremat.BudgetWarning")
@pytest.mark.parametrize("name", NORMS)
def test_a_batch_norm_runs_again_with_the_same_bits(name):
    (make, share), found = NORMS[name], []
    for compiled_by in ({"backend": "aot_eager"}, {"backend": "autoremat", "options": LEAST}):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = make()
        step = torch.compile(model, **compiled_by)
        for number in range(2):
            torch.manual_seed(number)
            x = torch.randn(4, CHANNELS, 16, 16, dtype=next(model.parameters()).dtype)
            with autoremat.track_peak("cpu") as peak:
                step(x).backward()
        found.append(([*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()], peak.bytes))
    (plain, plain_peak), (ours, our_peak) = found
    assert all(map(same_bits, plain, ours))
    assert our_peak <= share * plain_peak


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_rows_between_two_places(sizes, data):
    rows = torch.Size(sizes).numel()
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    whole = torch.randn(*sizes[:-1], sizes[-1] + 1, 2)[..., : sizes[-1], :]
    graph, mode = fx.Graph(), FakeTensorMode()
    given_node = graph.placeholder("given")
    given_node.meta["val"] = mode.from_tensor(whole)
    rewriting = _Rewriting(graph, Region(rows), [(start, stop)])
    graph.output(rewriting.between(given_node, len(sizes), start, stop, given_node))
    assert torch.equal(fx.GraphModule({}, graph)(whole), whole.reshape(rows, 2)[start:stop])
