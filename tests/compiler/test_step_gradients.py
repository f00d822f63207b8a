"""Gradients of earlier calls and micro-batches: counted, and warned of if and only if a measured step exceeds its budget."""

import random
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from block_models import Chain
from torch import Tensor, nn

import autoremat
from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, OptionsError, OptionWarning
from autoremat.compiler import overlap_warning
from autoremat.measure.peak import track_peak

WIDTH, LAYERS, BUDGET = 64, 6, 312_000
LONG, RAGGED, SHORT = 128, 112, 16
"""Rows of a micro-batch. A call of the last one is within the budget beside the gradients of all parameters."""

FOR_SURE = 0.03
"""Share of the budget within which neither a warning nor silence is wrong."""


class Model(Chain):
    def __init__(self) -> None:
        super().__init__(LAYERS, WIDTH, activation=torch.tanh, loss=lambda x: x.square().mean() if self.training else x.mean())


@dataclass(frozen=True)
class Call:
    rows: int
    trains: bool = True
    frozen: int = 0
    """Number of first layers whose parameters require no gradient."""
    open_before: int = 0
    """Number of calls of the same kind that are open before this one's backward."""


@dataclass(frozen=True)
class OneStep:
    calls: tuple[Call, ...]
    stepped: tuple[int, int] = (0, 2 * LAYERS)
    """Range of the parameters that the optimizer has."""
    steps: bool = True
    zeroes: bool = True
    to_none: bool = True


OPEN = [Call(SHORT, open_before=1), Call(SHORT, open_before=2), Call(RAGGED, False, open_before=1)]
ALL = [Call(rows, trains, frozen) for rows in (LONG, RAGGED, SHORT) for trains, frozen in ((True, 0), (False, 0), (True, 3))]


class Trained:
    """A compiled model whose graphs are all known."""

    def __init__(self, watch: overlap_warning.Watch) -> None:
        self.watch = watch
        self.model, self.inputs = Model(), {rows: torch.ones(rows, WIDTH) for rows in (LONG, RAGGED, SHORT)}
        options = {"memory_budget": BUDGET, "compiler": "aot_eager", "cost_model": "roofline"}
        self.compiled = torch.compile(self.model, backend="autoremat", dynamic=False, options=options)
        with torch._dynamo.config.patch(recompile_limit=len(ALL)):
            for call in ALL:
                self.run(call)
                self.model.zero_grad()
        self.graphs = list(self.watch.graphs)

    def run(self, call: Call) -> None:
        self.model.train(call.trains)
        for layer in self.model.layers[: call.frozen]:
            layer.requires_grad_(False)
        losses = [self.compiled(self.inputs[call.rows]) for _ in range(call.open_before + 1)]
        while losses:
            losses.pop().backward()
        self.model.requires_grad_(True)

    def end(self, step: OneStep) -> None:
        optimizer = torch.optim.SGD(list(self.model.parameters())[slice(*step.stepped)], lr=1e-3)
        if step.steps:
            optimizer.step()
        if step.zeroes:
            optimizer.zero_grad(set_to_none=step.to_none)

    def train(self, steps: list[OneStep]) -> tuple[bool, int]:
        """Whether training warned, and the highest measured peak of a step up to there."""
        self.watch.end()
        self.watch.told.clear()
        self.model.zero_grad()
        for graph in self.graphs:
            self.watch.add(graph)
        highest = 0
        for step in steps:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with track_peak("cpu") as peak:
                    for call in step.calls:
                        self.run(call)
                self.end(step)
            highest = max(highest, peak.bytes)
            if any(issubclass(one.category, BudgetWarning) for one in caught):
                return True, highest
        return False, highest


def drawn(draw: random.Random) -> list[OneStep]:
    """Steps of up to four micro-batches, with the ends that training loops have."""
    ends = [
        {}, {}, {"to_none": False}, {"zeroes": False}, {"steps": False}, {"stepped": (0, 6)}, {"stepped": (6, 12)},
    ]  # fmt: skip
    steps = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice([*ALL, *OPEN])
        kinds = [kind if draw.random() < 0.4 else draw.choice([*ALL, *OPEN]) for _ in range(draw.randint(1, 3))]
        steps.append(OneStep(tuple(kinds), **draw.choice(ends)))
    return steps


@pytest.mark.slow
def test_a_warning_comes_if_and_only_if_a_step_exceeds_its_budget(monkeypatch):
    watch = overlap_warning.Watch()
    monkeypatch.setattr(overlap_warning, "_watch", watch)
    trained, outcomes = Trained(watch), Counter()
    for seed in range(40):
        steps = drawn(random.Random(seed))
        warned, highest = trained.train(steps)
        if abs(highest / BUDGET - 1) > FOR_SURE:
            assert warned == (highest > BUDGET), (seed, highest, steps)
            outcomes[warned] += 1
    assert min(outcomes[True], outcomes[False]) > 5


HALVES = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
SMALL, GRADIENTS = torch.ones(4, WIDTH), 4 * 2 * (WIDTH * WIDTH + WIDTH)


def one_after_the_other(half: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> Tensor:
    """A loss of two graphs. The gradients of the second are live while the first computes its own."""
    first, second = map(half, HALVES)
    return second(first(SMALL)).sum()


def of_one_graph(half: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> Tensor:
    """A loss of two calls of one graph, whose gradients autograd sums."""
    compiled = half(HALVES[0])
    return compiled(SMALL).sum() + compiled(-SMALL).sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own look
@pytest.mark.parametrize("loss", [one_after_the_other, of_one_graph])
@pytest.mark.parametrize(("sets", "warns"), [(1.5, True), (2.5, False)])
def test_gradients_of_the_same_backward_count(loss, sets, warns):
    options = {"memory_budget": int(sets * GRADIENTS), "compiler": "aot_eager", "cost_model": "roofline"}
    result = loss(lambda half: torch.compile(half.forward, backend="autoremat", options=options))
    with warnings.catch_warnings(record=True) as caught, track_peak("cpu") as peak:
        warnings.simplefilter("always")
        result.backward()
    assert [issubclass(one.category, BudgetWarning) for one in caught] == [True] * warns
    assert (peak.bytes > options["memory_budget"]) == warns
    for half in HALVES:
        half.zero_grad()


def test_gradients_of_an_earlier_batch_count_though_the_inputs_alone_have_any():
    """The second batch is another graph of the same function, and no parameter links the two calls."""

    def loss(x: Tensor) -> Tensor:
        return x.sin().square().sum()

    batches = [torch.ones(rows, WIDTH, requires_grad=True) for rows in (WIDTH, WIDTH - 8)]
    options = {"memory_budget": int(3.2 * batches[0].nbytes), "compiler": "aot_eager", "cost_model": "roofline"}
    step = torch.compile(loss, backend="autoremat", options=options, dynamic=False)
    with warnings.catch_warnings(record=True) as caught, track_peak("cpu") as peak:
        warnings.simplefilter("always")
        for batch in batches:
            step(batch).backward()
    assert [issubclass(one.category, BudgetWarning) for one in caught] == [True]
    assert peak.bytes > options["memory_budget"]


def test_gradients_that_another_model_left_are_no_part_of_the_step():
    options = {"memory_budget": int(1.5 * GRADIENTS), "compiler": "aot_eager", "cost_model": "roofline"}
    for half in HALVES:  # the second step begins with the gradients of the first
        with track_peak("cpu") as peak:
            torch.compile(half.forward, backend="autoremat", options=options)(SMALL).sum().backward()
        assert peak.bytes <= options["memory_budget"]
    for half in HALVES:
        half.zero_grad()


EAGER = {"compiler": "aot_eager", "cost_model": "roofline"}
BROAD, FEW = 128, 4
OF_LAYERS = FEW * 4 * (BROAD * BROAD + BROAD)
MIB = 2**20


def Layers() -> Chain:
    return Chain(FEW, BROAD, activation=torch.tanh, loss=torch.sum)


def rows(count: int) -> Tensor:
    return torch.randn(count, BROAD)


def peak_of_step(model: nn.Module, size: int, calls: int, is_open: bool, **options: object) -> int:
    """Measured peak of a step of several calls, which may be open together, after a step that compiles."""
    torch._dynamo.reset()
    compiled, inputs = torch.compile(model, backend="autoremat", options={"cost_model": "roofline"} | options), rows(size)
    compiled(inputs).backward()
    model.zero_grad(set_to_none=True)
    with track_peak("cpu") as peak:
        for loss in [compiled(inputs) for _ in range(calls)] if is_open else (compiled(inputs) for _ in range(calls)):
            loss.backward()
    return peak.bytes


@pytest.mark.slow
def test_max_batch_holds_for_every_micro_batch():
    model, budget = Layers(), 2 * MIB
    first = autoremat.max_batch(rows, model, budget, step=128, options=EAGER)
    every = autoremat.max_batch(rows, model, budget, step=128, options=EAGER, accumulate=True)
    assert every.size < first.size
    assert every.report.resident_bytes == every.report.accumulated_bytes == OF_LAYERS
    measured = peak_of_step(model, every.size, 3, False, **EAGER, memory_budget=budget, accumulate=True)
    assert 0.95 * every.report.peak_bytes <= measured <= budget
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        assert peak_of_step(model, first.size, 3, False, **EAGER, memory_budget=budget) > budget


def test_reports_tell_first_and_later_micro_batches_apart():
    model, inputs = Layers(), rows(512)
    alone = autoremat.explain(model, inputs, options=EAGER | {"memory_budget": "2MiB"})
    counted = autoremat.explain(model, inputs, options=EAGER | {"memory_budget": "2MiB", "accumulate": True})
    assert alone.accumulated_bytes == counted.accumulated_bytes == counted.resident_bytes == OF_LAYERS
    assert re.search(r"accumulated_bytes +258\.00 KiB", str(alone.details))
    assert counted.budget_bytes == alone.budget_bytes
    assert counted.recomputed_ops >= alone.recomputed_ops


@pytest.mark.parametrize("change", ["none", "mode", "frozen"])
def test_the_watch_notices_once_that_gradients_stay_also_those_of_another_graph(change):
    model, inputs = Layers(), rows(512)
    compiled = torch.compile(model, backend="autoremat", options=EAGER | {"memory_budget": "1500KiB"}, dynamic=False)
    compiled(inputs).backward()
    model.train(change != "mode")
    model.layers[0].requires_grad_(change != "frozen")
    with pytest.warns(BudgetWarning, match=r"258\.00 KiB of gradients of earlier backwards") as caught:
        compiled(inputs).backward()
    fewer = autoremat.reports()[-1].accumulated_bytes < OF_LAYERS  # not under torch 2.11, which compiles no graph again
    assert ("Lower memory_budget by 64.50 KiB" in str(caught[0].message)) == fewer
    compiled(inputs).backward()  # a second warning would be an error


def test_a_step_profile_counts_by_itself():
    with pytest.raises(OptionsError, match="leave out in_flight and accumulate"):
        autoremat.profile_step(Layers(), rows(8), options=EAGER | {"in_flight": 2})
    profile = autoremat.profile_step(Layers(), rows(64), options=EAGER, memory_budget=1.0)
    with pytest.warns(OptionWarning, match="no effect under a profiled step"):
        torch.compile(Layers(), backend="autoremat", options=EAGER | {"memory_budget": profile, "in_flight": 2})(rows(64))


@pytest.mark.slow
def test_code_keeps_the_sum_of_its_open_calls_within_the_budget():
    measured = peak_of_step(Layers(), 512, 4, True, memory_budget=0.6, in_flight=4)
    report = autoremat.reports()[-1]
    assert report.compiled_peak_bytes is not None
    assert measured <= report.compiled_peak_bytes <= report.budget_bytes
    assert measured >= 0.85 * report.compiled_peak_bytes
    assert report.in_flight == 4


def test_an_infeasible_budget_names_the_other_calls():
    with pytest.raises(BudgetInfeasible) as caught:
        autoremat.explain(Layers(), rows(512), options=EAGER | {"memory_budget": "300KiB", "in_flight": 4})
    (others,) = (one for one in caught.value.occupants if "3 other calls in flight" in one.name)
    assert others.bytes > 0
    assert sum(one.bytes for one in caught.value.occupants) == caught.value.minimum_bytes
    assert caught.value.budget_bytes == 300 * 1024 < caught.value.lower_bound_bytes <= caught.value.minimum_bytes
