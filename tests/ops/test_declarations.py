"""Custom ops and Triton kernels: saved unless they are declared pure; then recomputed, at the cost that was declared."""

import operator
from collections.abc import Callable

import pytest
import torch
from oracles import same_bits
from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap
from torch.utils.checkpoint import CheckpointPolicy

import autoremat
from autoremat import OptionsError
from autoremat.capture.capture import capture
from autoremat.compiler import compile_loop
from autoremat.ops import declarations
from autoremat.passes import apply_plan
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Trait
from autoremat.planner.search.planner import Planner

pytestmark = [
    pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning"),
    # Dynamo's own look at autograd functions.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

LEAST = {"memory_budget": 1, "compiler": "aot_eager", "on_infeasible": "best_effort"}
ROWS, SIZE = 128, 16

RUNS: list[str] = []
"""Which custom op ran; a real op would do without such an effect."""


@torch.library.custom_op("autoremat_tests::squash", mutates_args=())
def squash(x: Tensor, factor: float = 1.0) -> Tensor:
    RUNS.append("squash")
    return torch.tanh(x) * factor


@squash.register_fake
def _(x: Tensor, factor: float = 1.0) -> Tensor:
    return torch.empty_like(x)


def keep(ctx, inputs, output) -> None:
    ctx.factor = inputs[1]
    ctx.save_for_backward(output)


def squash_backward(context, gradient):
    (output,) = context.saved_tensors
    return gradient * (context.factor - output.square() / context.factor), None


squash.register_autograd(squash_backward, setup_context=keep)


@torch.library.custom_op("autoremat_tests::fill_with_cubes", mutates_args=("out",))
def fill_with_cubes(x: Tensor, out: Tensor) -> None:
    RUNS.append("fill_with_cubes")
    torch.mul(x, x * x, out=out)


@torch.library.custom_op("autoremat_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


class Cubes(torch.autograd.Function):
    @staticmethod
    def forward(context, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        fill_with_cubes(x, out)
        context.save_for_backward(x)
        return out

    @staticmethod
    def backward(context, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return gradient * 3 * x.square()


def squashed(x: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        x = squash(x @ weight, 2.0)
    return x.sum()


def cubed(x: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        x = Cubes.apply(x @ weight).tanh()
    return x.sum()


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "_declared", {})


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """What is planned from here on."""
    found: list[Graph] = []
    original = compile_loop.plan_graph

    def plan_graph(priced, extra_headroom_bytes):
        found.append(priced.graph)
        return original(priced, extra_headroom_bytes)

    monkeypatch.setattr(compile_loop, "plan_graph", plan_graph)
    return found


def step(function: Callable[..., Tensor], **arguments: object) -> list[Tensor]:
    """The gradients of one compiled step; ``RUNS`` then holds that step's runs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(ROWS, SIZE, requires_grad=True)
    weights = [torch.randn(SIZE, SIZE).div(4).requires_grad_() for _ in range(4)]
    compiled = torch.compile(function, fullgraph=True, **arguments)
    RUNS.clear()
    compiled(x, weights).backward()
    return [t.grad for t in (x, *weights)]


@pytest.mark.parametrize(("function", "op"), [(squashed, "squash"), (cubed, "fill_with_cubes")])
def test_a_declared_op_runs_again_and_an_undeclared_one_does_not(function, op):
    expected = step(function, backend="aot_eager")
    once = RUNS.count(op)
    saved = step(function, backend="autoremat", options=LEAST)
    assert RUNS.count(op) == once == 4
    opaque = autoremat.reports()[-1]
    autoremat.declare_pure(f"autoremat_tests::{op}")
    recomputed = step(function, backend="autoremat", options=LEAST)
    assert RUNS.count(op) > once
    assert autoremat.reports()[-1].predicted_peak_bytes < opaque.predicted_peak_bytes
    for found in (saved, recomputed):
        assert all(map(same_bits, found, expected))


@pytest.mark.parametrize(
    ("op", "amounts", "found", "dynamic"),
    [
        (squash, {"flops": 7, "workspace_bytes": 9.0}, (7, 9), False),
        ("autoremat_tests::squash", {"flops": lambda x, factor: x.shape[0] * int(factor)}, (2 * ROWS, 0), True),
        (torch.ops.autoremat_tests.squash, {"workspace_bytes": lambda x, *_: x.nbytes}, (0, 4 * ROWS * SIZE), True),
        (torch.ops.autoremat_tests.squash.default, {}, (0, 0), False),
    ],
)
def test_the_declared_cost_is_that_of_each_call(graphs, op, amounts, found, dynamic):
    autoremat.declare_pure(op, **amounts)
    step(squashed, backend="autoremat", options=LEAST, dynamic=dynamic)
    calls = [o for o in graphs[0].ops if "squash" in o.target and o.forward]
    assert len(calls) == 4
    for call in calls:
        assert (call.flops, call.workspace_bytes) == found
        assert call.traits == Trait.NONE


def test_the_arguments_of_an_op_that_writes_have_their_names(graphs):
    autoremat.declare_pure(fill_with_cubes, flops=lambda x, out: 2 * x.numel() + out.numel())
    step(cubed, backend="autoremat", options=LEAST)
    assert [o.flops for o in graphs[0].ops if "functionalized" in o.target] == [3 * ROWS * SIZE] * 4


@pytest.mark.parametrize(
    ("op", "amounts", "message"),
    [
        ("autoremat_tests::squish", {}, "squish"),
        (noise, {}, "random numbers"),
        ("aten::_assert_async", {}, "an effect"),
        (squash, {"flops": -1}, "flops=-1"),
    ],
)
def test_what_cannot_be_declared_is_refused(op, amounts, message):
    with pytest.raises(OptionsError) as caught:
        autoremat.declare_pure(op, **amounts)
    assert message in str(caught.value)
    assert declarations.identity() == ""


def test_declarations_are_part_of_the_fingerprint():
    def formula(factor: int) -> Callable[..., int]:
        return lambda x, *_: factor * x.numel()

    def identity(**amounts: object) -> str:
        autoremat.declare_pure(squash, **amounts)
        return declarations.identity()

    nothing = declarations.identity()
    found = [nothing, identity(flops=1), identity(workspace_bytes=1), identity(flops=formula(2)), identity(flops=formula(3))]
    assert len(set(found)) == len(found)
    assert identity(flops=formula(2)) == found[3]


class Kernel:
    """Stands in for a Triton kernel, which needs a GPU: only its name counts while a graph is planned."""

    def __init__(self, fn: object) -> None:
        self.fn = fn

    def run(self) -> None:
        raise AssertionError("nothing is run while a graph is planned")


def double_kernel() -> None:
    """What a user would decorate with ``triton.jit``."""


def joint_with_kernel(kernel: Kernel) -> torch.fx.GraphModule:
    """sum(exp(kernel(x * 2))), all in a checkpoint region; the backward reads the result of exp."""
    graph = torch.fx.Graph()

    def node(value: object, made: torch.fx.Node, backward: bool = False) -> torch.fx.Node:
        made.meta |= {"val": value, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}
        if backward:
            made.meta["partitioner_tag"] = "is_backward"
        return made

    with torch._subclasses.FakeTensorMode():
        tensors = [torch.empty(SIZE, SIZE) for _ in range(6)]
        x = node(tensors[0], graph.placeholder("primals_1"))
        tangent = node(tensors[1], graph.placeholder("tangents_1"))
        number = triton_kernel_wrap.kernel_side_table.add_kernel(kernel)
        doubled = node(tensors[2], graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)))
        arguments = {"kernel_idx": number, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
        call = graph.call_function(
            triton_kernel_wrap.triton_kernel_wrapper_functional,
            (),
            arguments | {"kwargs": {"x": doubled, "out": x}, "tensors_to_clone": ["out"]},
        )
        node({"out": tensors[3]}, call)
        out = node(tensors[3], graph.call_function(operator.getitem, (call, "out")))
        power = node(tensors[4], graph.call_function(torch.ops.aten.exp.default, (out,)))
        loss = node(torch.empty(()), graph.call_function(torch.ops.aten.sum.default, (power,)))
        gradient = node(tensors[5], graph.call_function(torch.ops.aten.mul.Tensor, (tangent, power)), backward=True)
    graph.output((loss, gradient)).meta["desc"] = [None, None]
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize("declared", [False, True])
def test_triton_kernels_are_recomputed_only_if_declared(declared):
    kernel = Kernel(Kernel(double_kernel))  # as under an autotuner
    if declared:
        autoremat.declare_pure(kernel, flops=123)
    captured = capture(joint_with_kernel(kernel), 1, fuses=False)
    (call,) = [op for op in captured.graph.ops if "triton" in op.target]
    assert call.flops == (123 if declared else 0)
    assert call.rematerializable == declared
    assert [captured.graph.values[v].bytes for v in call.outputs] == [4 * SIZE**2]
    plan = Planner(captured.graph).find().plan
    _, backward = apply_plan(captured, plan.schedule, ())
    kernels = [n for n in backward.graph.nodes if "triton" in str(n.target)]
    assert len(kernels) == (1 if declared else 0)
