"""What keeps more alive in a step than the plan of one graph counts is noticed in the first step."""

import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from block_models import ROWS, WIDTH, Block, Broken
from torch import nn
from trained_steps import EAGER

import autoremat
from autoremat.basics.errors import BudgetWarning
from autoremat.compiler import overlap_warning as watch_module
from autoremat.torch_private import autograd

# Dynamo looks at `.grad` of what it is handed after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def watch(monkeypatch):
    """A watch of this test's own."""
    fresh = watch_module.Watch()
    monkeypatch.setattr(watch_module, "_watch", fresh)
    return fresh


def open_calls(watch: watch_module.Watch) -> int:
    return sum(len(step.open) for step in watch.steps)


def test_without_a_survey_graphs_that_are_over_the_budget_together_are_noticed(watch):
    model, inputs = Broken(2, dropout=0.0), torch.randn(ROWS, WIDTH)
    compiled = torch.compile(model, backend="autoremat", options={**EAGER, "memory_budget": 400_000})
    with pytest.warns(BudgetWarning, match=r"2 earlier calls hold.*autoremat\.profile_step") as caught:
        loss = compiled(inputs)
    assert len(caught) == 1
    loss.backward()
    compiled(inputs).backward()  # once is enough
    assert not watch.active
    assert not open_calls(watch)


def test_a_step_of_one_graph_is_watched_once(watch):
    model, inputs = Block(0.0), torch.randn(ROWS, WIDTH)
    compiled = torch.compile(model, backend="autoremat", options={**EAGER, "memory_budget": "1MiB"})
    first = compiled(inputs).sum()
    assert open_calls(watch) == 1
    assert watch.active
    del first  # freed without a backward
    gc.collect()
    assert not open_calls(watch)
    compiled(inputs).sum().backward()
    assert not watch.active
    compiled(inputs).sum()
    assert not open_calls(watch)


def test_retain_graph_within_the_budget_is_no_warning(watch):
    model, inputs = Block(0.0), torch.randn(ROWS, WIDTH)
    loss = torch.compile(model, backend="autoremat", options={**EAGER, "memory_budget": "1MiB"})(inputs).sum()
    loss.backward(retain_graph=True)
    assert open_calls(watch) == 1  # what was saved is still there
    loss.backward()
    assert not open_calls(watch)


def bytes_for(calls: int) -> int:
    """The bytes of a budget that so many open calls of the block keep exactly."""
    torch.compiler.reset()
    options = {**EAGER, "memory_budget": 1.0, "in_flight": calls, "accumulate": True}
    torch.compile(Block(0.0), backend="autoremat", options=options)(torch.randn(ROWS, WIDTH))
    torch.compiler.reset()
    return autoremat.reports()[-1].budget_bytes


class Denoiser(nn.Module):
    """A network with a skip connection, which a sampler calls for each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down, self.up = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 2, 1), nn.ConvTranspose2d(32, 16, 2, 2)
        self.norms = nn.ModuleList([nn.GroupNorm(8, 16), nn.GroupNorm(8, 32)])
        self.leave = nn.Conv2d(32, 3, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = nn.functional.silu(self.norms[0](self.enter(x)))
        low = nn.functional.silu(self.norms[1](self.down(high)))
        return self.leave(torch.cat([high, self.up(low)], 1))


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)))


IMAGES = [torch.randn(4, 3, 32, 32)] * 4
STEPS = {
    "equal calls, all kept": (deep, [torch.randn(512, 16)] * 4, 1.0),
    "equal calls": (deep, [torch.randn(512, 16)] * 4, 0.85),
    "a sampler": (Denoiser, IMAGES, 0.7),
    "sizes, of which the first is granted to all": (wide, [torch.randn(rows, 16) for rows in (2048, 600, 590, 580)], 0.4),
}
"""Networks, the inputs of the calls of a step, and shares."""


@pytest.mark.parametrize("step", STEPS)
def test_calls_under_a_share_are_judged_by_what_all_of_them_need(watch, step):
    make, inputs, share = STEPS[step]
    network = make()
    peaks = []
    for arguments in ({"backend": "aot_eager"}, {"backend": "autoremat", "options": {**EAGER, "memory_budget": share}}):
        compiled = torch.compile(network, dynamic=False, **arguments)
        for x in dict.fromkeys(inputs):
            compiled(x).sum().backward()
        watch.active = True
        network.zero_grad()
        with warnings.catch_warnings(record=True) as caught, autoremat.track_peak("cpu") as peak:
            warnings.simplefilter("always")
            sum(compiled(x).sum() for x in inputs).backward()
        peaks.append(peak.bytes)
    said = [one for one in caught if issubclass(one.category, BudgetWarning)]
    assert bool(said) == (peaks[1] > (share + 0.02) * peaks[0]) == (make is wide)


def test_equal_blocks_that_are_compiled_one_by_one_are_pointed_to_compile_blocks(watch):
    blocks = nn.Sequential(*(Block(0.0) for _ in range(4)))
    for block in blocks:
        block.compile(backend="autoremat", options={**EAGER, "memory_budget": "260KiB"})
    with pytest.warns(BudgetWarning, match=r"earlier calls? holds? .*\.compile_blocks\(blocks") as caught:
        blocks(torch.randn(ROWS, WIDTH))
    assert len(caught) == 1
    assert "in_flight" not in str(caught[0].message)


def test_graphs_under_shares_and_graphs_on_other_devices_are_alone(watch):
    model, inputs = Broken(2, dropout=0.0), torch.randn(ROWS, WIDTH)
    torch.compile(model, backend="autoremat", options={**EAGER, "memory_budget": 1.0})(inputs).backward()
    report = autoremat.reports()[-1]
    plan = replace(report.plan, budget_bytes=report.predicted_peak_bytes)
    stage = watch_module.Watched(replace(report, plan=plan), by_share=False)
    watch.active = True

    def on(index: int) -> watch_module.Call:
        step = watch._joined(watch_module.Step(torch.device("cuda", index)), [], None)
        return watch_module.Call(watch, stage, step)

    others = [on(index) for index in range(2)]
    for one in others:
        one.step.open[id(one)] = one
    on(2).judge(lambda: stage.report.peak_bytes, [])
    with pytest.warns(BudgetWarning, match="one earlier call holds"):
        on(1).judge(lambda: stage.report.peak_bytes, [])


def test_a_graph_that_views_what_an_earlier_one_made_has_no_backward_of_that(watch):
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    first = torch.compile(lambda x: (x @ weight).sin(), backend="autoremat", options={**EAGER, "memory_budget": "1MiB"})
    made = first(torch.randn(ROWS, WIDTH))
    assert autograd.backward_node([made]) is made.grad_fn
    assert autograd.backward_node([made.view(-1)]) is made.grad_fn
    assert autograd.backward_node([made.view(-1)], [made]) is None


def test_compiled_autograd_is_noticed(watch):
    model, inputs = Block(0.0), torch.randn(ROWS, WIDTH)
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(model, backend="autoremat", options={**EAGER, "memory_budget": 1.0})
        with pytest.warns(BudgetWarning, match="compiled autograd .* does not hold"):
            compiled(inputs)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_calls_in_flight_are_no_warning_and_further_ones_are(watch, calls):
    model, inputs = Block(0.0), torch.randn(ROWS, WIDTH)
    options = {**EAGER, "memory_budget": bytes_for(calls), "in_flight": calls, "accumulate": True}
    compiled = torch.compile(model, backend="autoremat", options=options)
    for _ in range(2):  # steps of so many calls, the first of which is watched: a warning would be an error
        watch.active = True
        losses = [compiled(inputs).sum() for _ in range(calls)]
        for loss in losses:
            loss.backward()
    watch.active = True
    open_ones = [compiled(inputs).sum() for _ in range(calls)]
    with pytest.warns(BudgetWarning, match=rf"one earlier call holds.*in_flight={calls + 1} counts so many") as caught:
        open_ones.append(compiled(inputs).sum())
    assert len(caught) == 1


def test_calls_of_other_threads_are_not_counted(watch):
    """Two threads that each keep the budget. A backward in yet another thread, as on CUDA, closes its call."""
    model, inputs = Block(0.0), torch.randn(ROWS, WIDTH)
    compiled = torch.compile(model, backend="autoremat", options={**EAGER, "memory_budget": 1.0})
    with ThreadPoolExecutor(1) as pool:  # a warning would be an error
        mine = compiled(inputs).sum()
        other = pool.submit(lambda: compiled(inputs).sum()).result()
        assert open_calls(watch) == 2
        pool.submit(mine.backward).result()
        assert open_calls(watch) == 1
        other.backward()
        assert not open_calls(watch)
        assert not watch.active


def test_the_watch_of_a_thread_sees_its_own_calls(watch):
    model, inputs = Block(0.0), torch.randn(ROWS, WIDTH)
    compiled = torch.compile(model, backend="autoremat", options={**EAGER, "memory_budget": bytes_for(1)})
    first = compiled(inputs).sum()

    def twice() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kept = [compiled(inputs).sum() for _ in range(2)]
        del kept
        return [str(one.message) for one in caught if issubclass(one.category, BudgetWarning)]

    with ThreadPoolExecutor(1) as pool:
        (said,) = pool.submit(twice).result()
    assert "one earlier call holds" in said
    first.backward()


def test_a_thread_within_its_first_forward_keeps_its_step(watch):
    """It has no open call and no gradient yet when another thread's call begins."""

    def join() -> watch_module.Step:
        return watch._joined(watch_module.Step(torch.device("cpu")), [torch.ones(1, requires_grad=True)], None)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join).result()
    mine = join()
    assert watch.steps == [other, mine]
