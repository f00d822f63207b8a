"""Facts about ops: an op is random if it advances the generator, sized by data if it runs once; what reductions end a pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import same_bits
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from trained_steps import gradients, trained

import autoremat
from autoremat.basics.errors import BudgetWarning
from autoremat.ops import op_table, op_traits
from autoremat.ops.op_traits import ends_pass
from autoremat.planner.graph.op import Trait
from autoremat.report.decisions import Decision

aten = torch.ops.aten
ROWS = torch.rand(4, 8)
HEADS = torch.rand(1, 2, 8, 4)

CALLS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten.bernoulli.default, (ROWS,)), *((aten.bernoulli.p, (ROWS, p)) for p in (0.0, 0.5, 1.0)),
    *((aten.native_dropout.default, (ROWS, p, train)) for p in (0.0, 0.5) for train in (True, False, None)),
    *((aten.rrelu_with_noise_functional.default, (-ROWS, ROWS, 0.1, 0.3, train)) for train in (True, False)),
    *((aten._scaled_dot_product_flash_attention_for_cpu.default, (HEADS, HEADS, HEADS, p)) for p in (0.0, 0)),
    *((aten.normal.Tensor_float, (ROWS, deviation)) for deviation in (0.0, 1.0)),
    *((aten.uniform.default, (ROWS, 0.0, end)) for end in (0.0, 1.0)), (aten.rand_like.default, (ROWS,)),
    (aten.randperm.default, (5,)), (aten.multinomial.default, (ROWS, 1)), (aten.poisson.default, (ROWS,)),
    (aten.binomial.default, (ROWS, ROWS)), (aten._standard_gamma.default, (ROWS,)), (aten._sample_dirichlet.default, (ROWS,)),
    (aten.exponential.default, (ROWS,)), (aten.geometric.default, (ROWS, 0.5)), (aten.exp.default, (ROWS,)),
)  # fmt: skip


@pytest.mark.parametrize(("op", "arguments"), CALLS, ids=[f"{number}-{op}" for number, (op, _) in enumerate(CALLS)])
def test_an_op_is_random_if_it_advances_the_generator(op: torch._ops.OpOverload, arguments: tuple[Any, ...]) -> None:
    with torch.random.fork_rng():
        before = torch.get_rng_state()
        op(*arguments)
        advanced = not torch.equal(torch.get_rng_state(), before)
    assert op_traits.is_random(fx.Graph().call_function(op, arguments)) == advanced


@pytest.mark.filterwarnings("ignore::autoremat.BudgetWarning")
def test_a_draw_with_probability_zero_leaves_the_generator_as_eager_does() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (torch.bernoulli(x.detach(), p=0.0) * x + x).square().mean()

    x = torch.randn(4, 8, requires_grad=True)
    options = {"compiler": "aot_eager", "memory_budget": 1, "on_infeasible": "best_effort"}
    states = []
    for function in (loss, torch.compile(loss, backend="autoremat", options=options)):
        torch.manual_seed(0)
        function(x).backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def attended(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(1, 2, 8, 4)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads.sin(), heads).reshape_as(x)


def without_dropout(x: torch.Tensor) -> torch.Tensor:
    return torch.dropout(x.sin(), 0.0, train=True) * x


@pytest.mark.parametrize(("function", "budget"), [(attended, 1), (without_dropout, 1.0)])
@pytest.mark.filterwarnings("ignore::autoremat.BudgetWarning")
def test_the_backward_runs_no_op_that_could_draw_where_compiled_code_draws_as_eager_code_does(function, budget) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    options = {"compiler": "aot_eager", "memory_budget": budget, "on_infeasible": "best_effort"}
    compiled = torch.compile(lambda: function(x).square().mean(), backend="autoremat", options=options)
    with torch._inductor.config.patch(fallback_random=True):
        (found,) = torch.autograd.grad(compiled(), x)
    (expected,) = torch.autograd.grad(function(x).square().mean(), x)
    assert torch.allclose(found, expected)


def far_from_its_sequence(nodes: list[Any], *_: Any) -> list[Any]:
    """A scheduler's nodes in a sequence that their dependencies allow. The last of those that can run always comes next."""
    found, pending = [], list(nodes)
    while pending:
        unmade = {name for node in pending for name in node.get_buffer_names()}
        ready = [node for node in pending if unmade.isdisjoint({d.name for d in node.unmet_dependencies})]
        found.append(ready[-1])
        pending.remove(ready[-1])
    return found


@pytest.mark.slow
def test_draws_keep_their_sequence_however_kernels_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.memory.reorder_for_peak_memory", far_from_its_sequence)

    def loss(x: torch.Tensor) -> torch.Tensor:
        torch.nn.functional.rrelu(x, training=True)  # draws, although nobody reads its result
        return torch.nn.functional.rrelu((x * torch.randn_like(x)).cos(), training=True).sum()

    compiled = torch.compile(loss, backend="autoremat", options={"cost_model": "roofline"})
    found = []
    with (
        torch._inductor.config.patch(fallback_random=True, fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        for function in (loss, compiled):
            x = torch.linspace(-2, 2, 1024).view(32, 32).requires_grad_()
            torch.manual_seed(1)
            function(x).backward()
            found.append((x.grad, torch.get_rng_state()))
    (expected, state), (gradient, own_state) = found
    assert torch.equal(own_state, state)
    torch.testing.assert_close(gradient, expected)


def test_no_op_has_two_rows_of_facts() -> None:
    ops = [op for _, listed in op_table.ROWS for op in listed]
    assert len(ops) == len(set(ops))


CPU, H100 = 1, 132
"""Multiprocessors."""

IMAGES = torch.zeros(2, 8, 4, 4)


def last_op_ends_pass(called: Callable[[torch.Tensor], object], operand: torch.Tensor, multiprocessors: int) -> bool:
    graph = make_fx(called)(operand).graph
    called_ops = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return ends_pass(called_ops[-1], multiprocessors)


@pytest.mark.parametrize("multiprocessors", [CPU, H100])
@pytest.mark.parametrize(
    ("called", "operand", "expected"),
    [
        (lambda x: x.sum(-1), torch.zeros(64, 100), False),
        (lambda x: x.sum(0), torch.zeros(64, 100), True),
        (lambda x: x.sum(0), torch.zeros(100, 64).t(), False),
        (lambda x: x.sum((0, 1)), torch.zeros(8, 8, 100), True),
        (lambda x: x.sum((1, 2)), torch.zeros(64, 8, 100), False),
        (lambda x: x.sum(0), torch.zeros(1, 100), False),
        (lambda x: x.sum(-1), torch.zeros(()), False),
        (lambda x: torch.softmax(x, -1), torch.zeros(64, 100), False),
        (lambda x: torch.softmax(x, 0), torch.zeros(64, 100), True),
        (lambda x: torch.ops.aten.var_mean.correction(x, [0, 2, 3]), IMAGES, True),
        (lambda x: torch.ops.aten.var_mean.correction(x, [0, 2, 3]), IMAGES.to(memory_format=torch.channels_last), True),
        (lambda x: x.scatter_add(0, torch.zeros(4, dtype=torch.int64), torch.ones(4)), torch.zeros(4), True),
        (lambda x: x + 1, torch.zeros(64, 100), False),
    ],
)
def test_reductions_that_are_none_of_rows_and_scatters_end_a_pass(called, operand, expected, multiprocessors):
    assert last_op_ends_pass(called, operand, multiprocessors) == expected


@pytest.mark.parametrize(
    ("rows", "length", "multiprocessors", "expected"),
    [
        (1, 10_000, CPU, True),
        (4, 10_000, CPU, False),
        (4, 10_000, H100, True),
        (4, 8_000, H100, False),
        (300, 10_000, H100, False),
    ],
)
def test_few_long_rows_end_a_pass(rows, length, multiprocessors, expected):
    assert last_op_ends_pass(lambda x: x.sum(1), torch.zeros(rows, length), multiprocessors) == expected


pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")


def over_a_threshold(x: Tensor, w: Tensor) -> Tensor:
    """The rows that score enough, as a router takes them: where they are, only their nonzero entries know."""
    h = (x @ w).sin()
    rows = (h.cos().mean(1) > 0.1).nonzero()[:, 0]
    return (h[rows].sin().sin() @ w).sin().square().mean()


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sizes_that_the_data_decide_are_not_decided_twice(inner):
    x, w = torch.randn(64, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    options = {"memory_budget": 1, "compiler": inner, "on_infeasible": "best_effort", "on_planning_error": "raise"}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        expected = gradients(torch.compile(over_a_threshold, fullgraph=True, backend=inner), [], x, w)
        found = trained(over_a_threshold, [], x, w, steps=1, **options)
    assert found.report.recomputed_ops > 0
    decisions = {value.decision for value in found.report.values if value.op == "aten.nonzero.default"}
    assert Decision.RECOMPUTED not in decisions, found.report
    assert inner == "inductor" or all(map(same_bits, found.tensors, expected))
    torch.testing.assert_close(found.tensors, expected)


@pytest.mark.parametrize("name", ["nonzero", "repeat_interleave.Tensor", "equal"])
def test_ops_whose_results_depend_on_data_have_the_trait(name):
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    assert Trait.DATA_DEPENDENT in op_traits.traits_of_op(op)


def test_what_binds_a_size_has_the_trait_whatever_its_op():
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))
    assert op_traits.traits_of(node) == Trait.NONE
    node.meta["unbacked_bindings"] = {"u0": ()}
    assert op_traits.traits_of(node) == Trait.DATA_DEPENDENT


def by_mask(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).sin()
    return (h[x[:, 0] > -9].sin() @ w).sin().square().mean()


def by_nonzero(x: Tensor, w: Tensor) -> Tensor:
    rows = ((x @ w > -99) & (torch.arange(16) < 8)).nonzero()[:, 0]
    torch._check(rows.shape[0] <= 600)
    return ((x @ w).sin()[rows].sin() @ w).sin().square().mean()


def selected(x: Tensor, w: Tensor) -> Tensor:
    return torch.masked_select((x @ w).sin(), x > -9).sin().sin().square().mean()


def repeated(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.repeat_interleave((x @ w).sin(), (x[:, 0] > -9).long() * 100, dim=0)
    return (rows.sin() @ w).sin().square().mean()


def repeated_within(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.repeat_interleave((x @ w).sin(), (x[:, 0] > -9).long() * 100, dim=0)
    torch._check(rows.shape[0] <= 8_000)
    return (rows.sin() @ w).sin().square().mean()


@pytest.mark.parametrize("loss", [by_mask, by_nonzero, selected, repeated_within])
def test_a_budget_holds_up_to_the_bound_of_a_size(loss):
    peak, report = step_of(loss, "16MiB")
    assert peak <= report.peak_bytes
    assert report.assumed_sizes == ()
    assert "upper bounds" in report.notes[-1]


def test_a_size_over_the_assumed_one_is_told_once():
    with pytest.warns(BudgetWarning, match=r"is 6400 .* at most 4096.*torch\._check\(size <= 6400\)") as caught:
        _, report = step_of(repeated, "4MiB")
    assert len(caught) == 1
    assert "assumed to be at most 4096" in report.notes[-1]
    assert autoremat.Report.from_json(report.to_json()).assumed_sizes == report.assumed_sizes


def test_an_infeasible_budget_names_the_assumption_and_the_bound():
    for loss, words in ((repeated, "assumed to be at most 4096"), (by_nonzero, "upper bounds, up to 600:")):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words):
            step_of(loss, "8KiB")


def step_of(loss: Callable[[Tensor, Tensor], Tensor], budget: str) -> tuple[int, autoremat.Report]:
    x, w = torch.randn(64, 16), torch.randn(16, 16, requires_grad=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        found = trained(loss, [], x, w, memory_budget=budget)
    return found.peak, found.report
