"""Whatever trains under torch.compile trains under a budget: what sweeps found, unforeseen graphs, and higher-order ops."""

from collections.abc import Callable

import pytest
import torch
from oracles import NO_RECOMPUTATION, same_bits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trained_steps import LEAST, measured

import autoremat
from autoremat.basics.errors import ISSUES
from autoremat.compiler import lowering

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")

Function = Callable[[torch.Tensor], torch.Tensor]


def gradient(function: Function, **arguments: object) -> torch.Tensor:
    """Of a positive definite 32x32 matrix, through a fresh compilation."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    root = torch.randn(32, 32)
    x = (root @ root.T + torch.eye(32)).requires_grad_()
    torch.compile(lambda x: function(x * 1.0).sin().sin().sin().sin().sin().sum(), fullgraph=True, **arguments)(x).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.cholesky, lambda x: torch.linalg.lu_factor(x)[0]])
def test_ops_that_check_their_result(function: Function) -> None:
    expected = gradient(function, backend="aot_eager")
    assert same_bits(gradient(function, backend="autoremat", options=LEAST), expected)
    assert autoremat.reports()[-1].recomputed_ops > 0


def chosen(x: torch.Tensor) -> torch.Tensor:
    places = (x > 0).nonzero()
    return x.sin()[places[:, 0], places[:, 1]].cos()


def test_assertions_about_sizes_stay_in_the_forward() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        expected = gradient(chosen, backend="aot_eager")
        assert same_bits(gradient(chosen, backend="autoremat", options=LEAST), expected)
    assert autoremat.reports()[-1].recomputed_ops > 0


def product(x: torch.Tensor) -> torch.Tensor:
    return x.sin() @ x.cos()


WARNED = LEAST | {"on_planning_error": "fallback"}

STAGES = (
    "compiler.joint_graph.capture", "compiler.planning.Planner", "compiler.lowering.apply_plan",
    "torch_private.joint_graphs.finish_module",
)  # fmt: skip
"""The last one comes half-way through the rewrite of a graph."""

FAILURES = (RuntimeError("as if"), MemoryError("as if"), KeyError("as if"), autoremat.PlanInvalid("as if"))


def failing(monkeypatch: pytest.MonkeyPatch, stage: str, failure: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(f"autoremat.{stage}", fail)


@pytest.mark.parametrize("stage", STAGES)
def test_no_failure_of_any_stage_reaches_the_user(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    expected = gradient(product, backend="aot_eager")
    failure = FAILURES[STAGES.index(stage)]
    failing(monkeypatch, stage, failure)
    with pytest.warns(autoremat.FallbackWarning) as caught:
        found = gradient(product, backend="autoremat", options=WARNED)
    (warning,) = [w for w in caught if issubclass(w.category, autoremat.FallbackWarning)]
    for part in (f"{type(failure).__name__}: ", "as if", "test_every_model.py:", ISSUES):
        assert part in str(warning.message)
    assert same_bits(found, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_no_budget_is_lost_to_a_failure(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    failing(monkeypatch, stage, RuntimeError("as if"))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        gradient(product, backend="autoremat", options=LEAST)
    error = caught.value.inner_exception
    assert isinstance(error, autoremat.PlanningError)
    for part in ("memory budget cannot be kept", "RuntimeError: as if", "test_every_model.py:", 'on_planning_error="fallback"'):
        assert part in str(error)


def test_without_a_budget_a_failure_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "compiler.lowering.apply_plan", RuntimeError("as if"))
    with pytest.warns(autoremat.FallbackWarning, match="as if"):
        gradient(product, backend="autoremat", options={"compiler": "aot_eager"})


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["torch_private.inductor_lowering._lowered_peak", "compiler.compile_loop.load_record"])
def test_no_failure_around_inductor_reaches_the_user(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    expected = gradient(product, backend="inductor")
    failing(monkeypatch, stage, RuntimeError("as if"))
    options = WARNED | {"compiler": "inductor"}
    with pytest.warns(autoremat.FallbackWarning, match=r"test_every_model\.py:.*RuntimeError: as if.*/issues"):
        found = gradient(product, backend="autoremat", options=options)
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="as if"):
        gradient(product, backend="autoremat", options=LEAST | {"compiler": "inductor"})


def test_a_planner_without_time_still_finds_a_plan() -> None:
    expected = gradient(product, backend="aot_eager")
    assert same_bits(gradient(product, backend="autoremat", options=LEAST | {"time_limit": 1e-9}), expected)
    assert autoremat.reports()[-1].time_limited


ROWS, SIZE = 64, 16

Body = Callable[[Tensor, Tensor, Tensor], Tensor]


def branches(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    hidden = torch.tanh(x @ weight)
    return torch.cond(hidden.sum() > 0, lambda a, b: (a @ b).sin(), lambda a, b: a.cos() @ b, (hidden, other))


def loops(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """A loop whose number of runs depends on data."""
    from torch._higher_order_ops.while_loop import while_loop

    hidden, start = torch.tanh(x @ weight), torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, torch.tanh(a * 1.5)), (start, hidden.detach()))[1] * hidden


def scans(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan

    def combine(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        following = torch.tanh(carry @ weight + row)
        return following, following * 2

    return scan(combine, (x @ other).sum(0), torch.tanh(x @ other))[1]


def prefix_products(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan(torch.mul, torch.sigmoid(x @ weight), dim=0, combine_mode="generic")


def maps(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    from torch._higher_order_ops.map import map as torch_map

    return torch_map(lambda row, w: torch.tanh(row @ w), torch.tanh(x @ weight), other)


@torch.compiler.nested_compile_region
def layer(x: Tensor, weight: Tensor) -> Tensor:
    return x + torch.tanh(F.gelu(x @ weight) @ weight)


@torch.compiler.nested_compile_region
def dropping_layer(x: Tensor, weight: Tensor) -> Tensor:
    return x + F.dropout(torch.tanh(x @ weight), 0.5)


def nested_regions(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    return layer(layer(x, weight), other)


def random_regions(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    return torch.tanh(dropping_layer(x, weight) @ other)


def flexible_attention(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """Torch has no backward of it on CPUs, so what it gives here is a factor without a gradient."""
    from torch.nn.attention.flex_attention import flex_attention

    hidden = torch.tanh(x @ weight)
    heads, bias = hidden.detach().view(1, 2, ROWS, -1), hidden.detach().sum(0)
    factor = flex_attention(heads, heads, heads, score_mod=lambda score, b, h, i, j: score + bias[i % 2] * (i - j))
    return torch.tanh(hidden * factor.view_as(hidden) @ other)


def effects(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """Ops that check their result, which torch threads a token through."""
    hidden = torch.tanh(x @ weight)
    inverse = torch.linalg.inv(hidden.t() @ hidden + torch.eye(SIZE))
    return torch.tanh(hidden @ inverse)


def checkpointed(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """A user's region around another higher-order op; not around all of them: torch's own tagging knows only some."""
    return checkpoint(lambda a: layer(torch.tanh(a @ weight), other), x, use_reentrant=False)


FUNCTIONS = (
    nested_regions, effects, checkpointed,
    *(
        pytest.param(function, marks=pytest.mark.slow)
        for function in (branches, loops, random_regions, maps, scans, prefix_products, flexible_attention)
    ),
)  # fmt: skip

RUN_AGAIN = {
    branches: "cond", loops: "while_loop", scans: "scan", maps: "map_impl", nested_regions: "invoke_subgraph",
    checkpointed: "invoke_subgraph",
}  # fmt: skip
"""Where the higher-order op itself is recomputed; the others draw random numbers, have an effect, or are worth saving."""


def repeated(function: Body) -> Body:
    """The loss of ``function`` applied three times over."""

    def loss(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        for _ in range(3):
            x = function(x, weight, other)
        return x.exp().mean()

    return loss


def step(function: Body, **arguments: object) -> tuple[list[Tensor], int]:
    """Loss and gradients of a compiled step, and its measured peak in bytes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    leaves = [torch.randn(rows, SIZE).div(2).requires_grad_() for rows in (ROWS, SIZE, SIZE)]
    return measured(torch.compile(repeated(function), fullgraph=True, **arguments), [], *leaves)


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The backward modules of what is planned from here on."""
    found: list[torch.fx.GraphModule] = []
    original = lowering.apply_plan

    def apply_plan(*arguments: object):
        modules = original(*arguments)
        found.append(modules[1])
        return modules

    monkeypatch.setattr(lowering, "apply_plan", apply_plan)
    return found


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_higher_order_op_is_exact(function: Body, backwards):
    expected, _ = step(function, backend=NO_RECOMPUTATION)
    found, peak = step(function, backend="autoremat", options=LEAST)
    assert len(found) == len(expected)
    assert all(map(same_bits, found, expected))
    report = autoremat.reports()[-1]
    assert report.recomputed_ops > 0
    assert report.predicted_peak_bytes < report.baseline_peak_bytes
    if function is not flexible_attention:  # uncompiled, torch makes its scores several times over
        assert peak <= report.predicted_peak_bytes
    again = {
        n.target.name()
        for n in backwards[-1].graph.nodes
        if "autoremat_recompute_of" in n.meta and isinstance(n.target, torch._ops.HigherOrderOperator)
    }
    assert again == ({RUN_AGAIN[function]} if function in RUN_AGAIN else set())
