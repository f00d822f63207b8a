"""One budget for a step of several compiled graphs: measured peaks, the same bits, and what a step profile leaves behind."""

import functools
from collections.abc import Callable

import pytest
import torch
from block_models import ROWS, WIDTH, Block, Broken, Layered
from oracles import same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from trained_steps import EAGER, gradients, measured

import autoremat
from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, OptionsError, StepProfileError
from autoremat.compiler import dynamo_backend
from autoremat.compiler.peers import Gathers, agreed_profile
from autoremat.planner.multigraph.ledger import Moment
from autoremat.planner.multigraph.step import Step, StepGraph
from autoremat.planner.plans.limits import PlanPoint, Share
from autoremat.request.request import Request, RequestedLimits

# Dynamo looks at `.grad` of what it is handed after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., Callable[..., torch.Tensor]]:
    return lambda backend, options=None: torch.compile(function, backend=backend, options=options)


def check_steps(model: nn.Module, build, inputs: torch.Tensor, *surveys: autoremat.StepProfile) -> None:
    """Compile under each step profile: the step fits, is as predicted, and has the bits of the plain one."""
    torch.compiler.reset()
    expected = gradients(build("aot_eager"), model, inputs)
    for profile in surveys:
        torch.compiler.reset()
        step = build("autoremat", {**EAGER, "memory_budget": profile})
        peak = measured(step, model, inputs)[1]
        assert peak <= profile.budget_bytes
        assert 0.9 * profile.peak_bytes <= peak <= profile.peak_bytes
        found = gradients(step, model, inputs)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [1, 2, 5])
def test_the_step_fits_its_budget_over_graph_breaks(breaks):
    model, inputs = Broken(breaks), torch.randn(ROWS, WIDTH)
    model.norm.track_running_stats = False
    found = autoremat.profile_step(model, inputs, memory_budget=1.0, options=EAGER)
    # Middle blocks without a neighbour in their graph are one graph, compiled several times.
    assert sum(graph.calls for graph in found.step.graphs) == breaks + 1
    assert len(found.step.graphs) == min(breaks + 1, 3)

    surveys = [found.within(found.minimum_peak_bytes), found.within(0.7)]
    for profile in surveys:
        assert profile.peak_bytes <= profile.budget_bytes < profile.baseline_peak_bytes
        assert profile.added_seconds >= 0.0
    check_steps(model, compiled(model), inputs, *surveys)


def test_the_step_fits_its_budget_where_one_block_is_compiled_and_called_twelve_times():
    model, inputs = Layered(), torch.randint(0, 50, (ROWS,))

    def build(backend, options=None):
        return model.compile_layers(backend=backend, options=options)

    build("autoremat", EAGER)
    found = autoremat.profile_step(model, inputs, memory_budget=1.0, options=EAGER)
    assert [graph.calls for graph in found.step.graphs] == [12]
    assert found.step.order == ("forward 0",) * 12 + ("backward 0",) * 12
    check_steps(model, build, inputs, found.within(found.minimum_peak_bytes), found.within(0.6))
    # Each of the twelve would fit alone; together they do not.
    torch.compiler.reset()
    step = build("autoremat", {**EAGER, "memory_budget": found.minimum_peak_bytes})
    with pytest.warns(BudgetWarning, match="6 earlier calls hold"):
        alone = measured(step, model, inputs)[1]
    assert alone > found.minimum_peak_bytes


def test_a_survey_leaves_the_model_and_the_random_state_as_they_were():
    model, inputs = Broken(1), torch.randn(ROWS, WIDTH, requires_grad=True)
    model.a.up.weight.grad = kept = torch.ones_like(model.a.up.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    reports = len(autoremat.reports())
    autoremat.profile_step(model, inputs, memory_budget="1MiB", options=EAGER)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.a.up.weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert inputs.grad is None
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name != "a.up.weight")
    assert all(same_bits(before[name], tensor) for name, tensor in model.state_dict().items())
    assert len(autoremat.reports()) == reports


def test_what_runs_between_the_graphs_counts():
    """The eager part between two graphs saves more than both of them."""
    model = nn.ModuleList([Block(0.0), Block(0.0)])
    inputs = torch.randn(ROWS, WIDTH)

    @torch._dynamo.disable
    def between(x):
        for _ in range(20):
            x = torch.tanh(x)
        return x

    def function(x):
        return model[1](between(model[0](x))).square().mean()

    profile = autoremat.profile_step(function, inputs, memory_budget=1.0, options=EAGER)
    eager_bytes = 20 * ROWS * WIDTH * 4
    assert profile.minimum_peak_bytes > eager_bytes
    check_steps(model, compiled(function), inputs, profile)


def test_what_cannot_be_surveyed_is_an_error():
    model, inputs = Broken(1, dropout=0.0), torch.randn(ROWS, WIDTH)
    profile = functools.partial(autoremat.profile_step, memory_budget=1.0)
    with pytest.raises(StepProfileError, match="loss="):
        profile(model.a, inputs, options=EAGER)
    with pytest.raises(StepProfileError, match="regional"):
        profile(model, inputs, options=EAGER, regional=True)
    with pytest.raises(StepProfileError, match="require a gradient"):
        profile(lambda x: x.sum(), inputs, options=EAGER)
    with pytest.raises(OptionsError, match="memory_budget"):
        profile(model, inputs, options={"memory_budget": 1})
    found = profile(model.a, inputs, options=EAGER, loss=torch.Tensor.sum)
    assert len(found.step.graphs) == 1
    with pytest.raises(OptionsError, match="of another"):
        autoremat.profile_step(model, inputs, memory_budget=found)


def test_graphs_without_a_backward_belong_to_the_surveyed_step():
    linear, x = nn.Linear(16, 16), torch.randn(8, 16)

    def loss(x):
        hidden = linear(x).tanh()
        torch._dynamo.graph_break()
        best = hidden.topk(4, -1)[1]  # may train, by its inputs, and saves nothing
        torch._dynamo.graph_break()
        return hidden.gather(-1, best).square().mean()

    found = autoremat.profile_step(loss, x, memory_budget=1.0, options=EAGER)
    assert len(found.step.graphs) == 2
    assert len(found.step.others) == 1
    torch.compile(loss, backend="autoremat", options={**EAGER, "memory_budget": found})(x).backward()


@pytest.mark.slow
@pytest.mark.parametrize("regional", [False, True], ids=["graph breaks", "regional"])
def test_the_step_fits_its_budget_under_inductor(regional):
    if regional:
        model, inputs = Layered(dropout=0.0), torch.randint(0, 50, (10 * ROWS,))
        step = model.compile_layers(backend="autoremat")
    else:
        model, inputs = Broken(1, dropout=0.0), torch.randn(10 * ROWS, WIDTH)
        step = torch.compile(model, backend="autoremat")
    peaks, found = [], autoremat.profile_step(model, inputs, memory_budget=1.0)
    for budget in (1.0, 0.8) if regional else (0.8,):
        profile = found.within(budget)
        autoremat.configure(memory_budget=profile)
        peaks.append(measured(step, model, inputs)[1])
        assert peaks[-1] <= profile.budget_bytes
        torch.compiler.reset()
    if regional:  # the broken function has one budget alone
        assert peaks[-1] < peaks[0]


def test_an_optimizer_in_the_backward_does_not_step_in_a_profile_and_its_gradients_can_count_as_freed():
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    layers = [Layer(64, 64, bias=False) for _ in range(4)]
    for layer in layers:
        layer.compile(backend="autoremat", options={"compiler": "aot_eager"})
    model, steps = nn.Sequential(*layers), []
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(steps.append)

    def end_of_step(**options: bool) -> int:
        profile = autoremat.profile_step(
            lambda x: model(x).sum(), torch.ones(4, 64), regional=True, options={"compiler": "aot_eager"} | options
        )
        return profile.step.moments[-1].base_bytes

    of_layer = before[0].numel() * before[0].element_size()
    assert end_of_step() - end_of_step(hooks_free_gradients=True) == 3 * of_layer, "the last one is live until its hook"
    assert not steps
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(4, 64)).sum().backward()
    assert len(steps) == 4, "the hooks are back"


@pytest.mark.parametrize("saved", [1, 1 << 20])
def test_the_error_of_a_share_names_more_bytes_than_its_budget(saved, monkeypatch):
    torch.compiler.reset()
    limits = RequestedLimits(1 << 22, step_share=Share(saved, 1 << 22, 1 << 22 if saved == 1 else 1))
    monkeypatch.setattr(dynamo_backend, "requests_of", lambda options, around: {None: Request.of(options, limits)})
    layer = torch.compile(Block(0.0), backend="autoremat", options=EAGER)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        layer(torch.randn(ROWS, WIDTH, requires_grad=True))
    error = caught.value.inner_exception
    assert isinstance(error, BudgetInfeasible)
    assert error.minimum_bytes > error.budget_bytes == 1 << 22


class Checkpointed(nn.Module):
    """Compiled blocks, each within a checkpoint, which drops what the block saves and calls it again in the backward."""

    def __init__(self, blocks: nn.ModuleList, early_stop: bool) -> None:
        super().__init__()
        self.blocks, self.early_stop = blocks, early_stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_early_stop(self.early_stop):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize("early_stop", [True, False])
def test_what_a_checkpoint_drops_is_not_counted_as_held(early_stop):
    blocks, x = nn.ModuleList(Block(0.0) for _ in range(5)), torch.randn(512, WIDTH)
    for block in blocks:
        block.compile(backend="autoremat", options=EAGER)
    step = Checkpointed(blocks, early_stop)
    profile = autoremat.profile_step(step, x, memory_budget=1.0, regional=True, options=EAGER)
    for block in blocks:
        block.compile(backend="aot_eager")
    reference = measured(step, step, x)[1]
    assert profile.reference_peak_bytes == pytest.approx(reference, rel=0.1)
    for block in blocks:
        block.compile(backend="autoremat", options={**EAGER, "memory_budget": profile})
    assert measured(step, step, x)[1] <= profile.budget_bytes


def test_the_watch_counts_nothing_that_a_checkpoint_drops():
    blocks, x = nn.ModuleList(Block(0.0) for _ in range(3)), torch.randn(512, WIDTH)
    torch.compiler.reset()
    block = torch.compile(blocks[0], backend="autoremat", options={**EAGER, "memory_budget": 1.0})
    block(x).sum().backward()
    report = autoremat.reports()[-1]
    room = report.budget_bytes + report.gradient_bytes * 3 + 3 * x.nbytes  # with gradients, and what the checkpoints keep
    assert report.saved_bytes + report.peak_bytes > room
    for block in blocks:
        block.compile(backend="autoremat", options={**EAGER, "memory_budget": room})
    step = Checkpointed(blocks, early_stop=True)
    assert measured(step, step, x)[1] <= room  # a warning would be an error


def step_of(peak: int) -> Step:
    point = PlanPoint(0.0, 0, peak, peak)
    graph = StepGraph("key", "train.py:7", 1, (point,), point)
    return Step((graph,), (Moment(0, running=0, backward=True),), (), "cpu")


def test_gathers_run_once_if_their_ranks_do_not_share_the_plans():
    def profile(ranks: set[int]) -> int:
        gathers = Gathers(frozenset(ranks), lambda: step_of(700))
        return agreed_profile(step_of(400), Request(), "a step", gathers=gathers).peak_bytes

    assert profile({0, 1}) == 700  # this process is alone
    assert profile(set()) == 400
