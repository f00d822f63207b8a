"""Blocks compiled one by one: budgets held, and what a training loop may do to them."""

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from block_models import ROWS, WIDTH, Block, Layered
from oracles import same_bits
from processes import run_ranks
from torch import nn
from trained_steps import EAGER, gradients, measured

import autoremat
from autoremat import step_profile
from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, OptionsError, StepProfileError
from autoremat.torch_private.autograd import leaves_of

# Dynamo looks at `.grad` of what an eager module hands to a block.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


BEFORE = 2 * ROWS * WIDTH * 4
"""The embedding's result, which the profile does not see, and its gradient."""


def layered(layers: int = 6) -> tuple[Layered, torch.Tensor]:
    torch.manual_seed(0)
    torch.compiler.reset()
    return Layered(layers), torch.randint(0, 50, (ROWS,))


def compiled(blocks: Iterable[nn.Module], budget: object, step: Callable[[], torch.Tensor], **options: object) -> Any:
    """Compiled blocks that are planned, after two steps that leave no gradients."""
    found = autoremat.compile_blocks(blocks, budget, options=options)
    for _ in range(2):
        loss = step()
        leaves = leaves_of(loss)
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
    for leaf in leaves:
        leaf.grad = None
    assert found._may_plan(found._first_steps)
    return found


def train(model: nn.Module, inputs: torch.Tensor, steps: int) -> list[float]:
    """Losses of a training loop."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_blocks_keep_the_budget_of_the_step_with_few_compilations_and_the_same_bits():
    model, inputs = layered(12)
    expected = gradients(model, model, inputs)
    names = list(model.state_dict())
    blocks = compiled(model.layers, 0.6, lambda: model(inputs), **EAGER)
    assert len(blocks.profile.step.graphs) == 12
    assert len(set(blocks.profile.step.numbers)) == 1
    peaks = []
    for budget in (0.6, 0.8, blocks.profile.minimum_peak_bytes):
        profile = blocks.within(budget)
        before = len(autoremat.reports())
        peaks.append(measured(model, model, inputs)[1])
        assert len(autoremat.reports()) - before == len(profile.variants) <= 3
        assert 0.9 * profile.peak_bytes <= peaks[-1] <= profile.peak_bytes + BEFORE
        assert profile.peak_bytes <= profile.budget_bytes
        assert all(same_bits(a, b) for a, b in zip(gradients(model, model, inputs), expected, strict=True))
    assert peaks[2] < peaks[0] < peaks[1]
    assert list(model.state_dict()) == names
    assert "blocks" in str(blocks)
    assert "12 blocks" in repr(blocks)


def test_the_budget_may_be_that_of_a_whole_device():
    model, inputs = layered()
    optimizer = torch.optim.AdamW(model.parameters())
    step = compiled(model.layers, 1.0, lambda: model(inputs), **EAGER).profile
    ledger = autoremat.device_budget("1GiB", model, optimizer)
    held = ledger.total_bytes - ledger.budget_bytes
    total = held + (step.minimum_peak_bytes + step.baseline_peak_bytes) // 2
    device = autoremat.device_budget(total, model, optimizer)
    blocks = autoremat.compile_blocks(model.layers, device, options=EAGER)
    train(model, inputs, 3)
    assert blocks.profile.budget_bytes == device.budget_bytes
    assert autoremat.reports()[-1].predicted_device_bytes <= total
    # The count begins at the first block: what the embedding holds is taken from the reserve.
    assert measured(model, model, inputs)[1] <= device.budget_bytes + device.reserve_bytes


def test_the_second_training_step_is_measured():
    model, inputs = layered()
    plain = copy.deepcopy(model)
    blocks = autoremat.compile_blocks(model.layers, 0.7, options=EAGER)
    torch.manual_seed(1)
    losses = train(model, inputs, 4)
    torch.manual_seed(1)
    assert losses == train(plain, inputs, 4)
    profile = blocks.profile
    assert profile.peak_bytes <= profile.budget_bytes == int(0.7 * profile.baseline_peak_bytes)
    peak = measured(model, model, inputs)[1]
    assert 0.9 * profile.peak_bytes <= peak <= profile.peak_bytes + BEFORE


def test_an_impossible_budget_is_an_error_in_the_third_step():
    model, inputs = layered(3)
    autoremat.compile_blocks(model.layers, 1000, options=EAGER)
    train(model, inputs, 2)
    for _ in range(2):
        with pytest.raises(BudgetInfeasible) as raised:
            train(model, inputs, 1)
        assert raised.value.budget_bytes == 1000 < raised.value.minimum_bytes
    blocks = autoremat.compile_blocks(model.layers, 1000, options={**EAGER, "on_infeasible": "best_effort"})
    train(model, inputs, 2)
    with pytest.warns(BudgetWarning, match="over its budget"):
        train(model, inputs, 1)
    assert blocks.profile.peak_bytes == blocks.profile.minimum_peak_bytes


def test_several_forwards_before_their_backwards_are_open_calls():
    model, inputs = layered(4)

    def both() -> torch.Tensor:
        return model(inputs) + model(inputs.flip(0))

    blocks = compiled(model.layers, 0.7, both, **EAGER)
    assert [graph.calls for graph in blocks.profile.step.graphs] == [2] * 4
    both().backward()
    model.zero_grad(set_to_none=True)
    with autoremat.track_peak("cpu") as peak:
        both().backward()
    assert 0.9 * blocks.profile.peak_bytes <= peak.bytes <= blocks.profile.peak_bytes + 2 * BEFORE
    assert blocks.profile.peak_bytes <= blocks.profile.budget_bytes


class Named(Block):
    """A block whose arguments have names that this package uses too."""

    def forward(self, x: torch.Tensor, *, block: int, number: int) -> torch.Tensor:
        return super().forward(x) * (block + number)


def test_blocks_keep_no_parameters_and_no_names_of_arguments():
    blocks = [Named(0.0) for _ in range(2)]
    found = autoremat.compile_blocks(blocks, 1.0, options=EAGER)
    for block in blocks:  # as `fully_shard` and `to_empty` do it
        for module in block.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
    x = torch.randn(ROWS, WIDTH)
    blocks[1](blocks[0](x, block=1, number=1), block=1, number=0).sum().backward()
    assert found._has_gradients()


def test_gradients_of_earlier_micro_batches_count():
    peaks = {}
    for accumulate in (False, True):
        model, inputs = layered(4)
        blocks = autoremat.compile_blocks(model.layers, 1.0, options={**EAGER, "accumulate": accumulate})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            with autoremat.track_peak("cpu") if blocks.profile else contextlib.nullcontext() as measured:
                model(inputs).backward()
                model(inputs).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        peaks[accumulate] = blocks.profile.baseline_peak_bytes
    of_gradients = sum(p.nbytes for p in model.layers[0].parameters())
    assert peaks[True] >= peaks[False] + of_gradients
    assert measured.bytes <= peaks[True] <= measured.bytes + of_gradients // 2  # those of the block count once


def test_calls_without_gradients_and_forwards_without_backward_do_not_disturb():
    model, inputs = layered(3)
    blocks = autoremat.compile_blocks(model.layers, 0.8, options=EAGER)
    model.eval()
    with torch.no_grad():
        before = model(inputs)
    model(inputs)  # never differentiated
    assert torch.equal(before, model(inputs))
    model.train()
    train(model, inputs, 1)
    model(inputs)
    train(model, inputs, 3)  # the step after a forward without backward is not measured
    assert blocks.profile is not None
    with torch.no_grad():
        model.eval()(inputs)
    assert measured(model, model.train(), inputs)[1] > 0


@pytest.mark.slow
def test_other_inputs_keep_to_the_limits_of_the_block():
    model, inputs = layered(3)
    blocks = compiled(model.layers, 0.9, lambda: model(inputs), **EAGER)
    assert measured(model, model, inputs[: ROWS // 2])[1] <= blocks.profile.budget_bytes
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        model(torch.randint(0, 50, (20 * ROWS,)))
    assert isinstance(raised.value.inner_exception, BudgetInfeasible)
    assert "profile_again" in str(raised.value.inner_exception)
    larger = torch.randint(0, 50, (4 * ROWS,))
    blocks.profile_again()
    assert blocks.profile is None
    train(model, larger, 3)
    assert blocks.profile is not None


@pytest.mark.slow
def test_models_with_compiled_blocks_are_copied_pickled_and_compiled_again():
    model, inputs = layered(3)
    blocks = compiled(model.layers, 0.8, lambda: model(inputs), **EAGER)
    model.eval()
    expected = model(inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(inputs), expected)
        assert other.layers[0]._compiled_call_impl is None
    whole = torch.compile(model, backend="autoremat", options={**EAGER, "memory_budget": 1.0})
    before = len(autoremat.reports())
    assert torch.equal(whole(inputs), expected)
    assert len(autoremat.reports()) == before + 1  # one graph, which contains the blocks
    autoremat.compile_blocks(model.layers, 0.9, options=EAGER)  # takes the place of the first call
    train(model, inputs, 3)
    assert blocks.profile.budget_bytes < blocks.profile.baseline_peak_bytes


@pytest.mark.parametrize("needed", [1001, 2000])
def test_blocks_give_way_by_the_excess_of_their_code(monkeypatch, needed):
    model, inputs = layered(3)
    blocks = compiled(model.layers, 0.9, lambda: model(inputs))
    before = blocks.profile.step
    errors = [BudgetInfeasible(budget_bytes=1000, minimum_bytes=needed, lower_bound_bytes=0)]

    def backend(gm, inputs, **_):
        if errors:
            raise errors.pop()
        return gm.forward

    monkeypatch.setattr(step_profile.blocks, "backend", backend)
    model(inputs).backward()
    assert not errors
    assert blocks.profile.step == before.with_higher_peaks(0, {1001: 0.005, 2000: 0.05}[needed])


class Halves(nn.Module):
    """A block with a graph break in the middle. Its first half draws random numbers and moves running averages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.down = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.norm(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.down(x))


@pytest.mark.parametrize("failing", [0, 1])
def test_what_ran_before_a_graph_that_gives_way_does_not_run_again(monkeypatch, failing):
    model, inputs = layered(2)
    model.layers = nn.ModuleList(Halves() for _ in range(2))
    plain = copy.deepcopy(model)
    blocks = compiled(model.layers, 1.0, lambda: model(inputs))
    model.load_state_dict(plain.state_dict())  # profiling moves the averages
    seen = 0

    def backend(gm, inputs, **_):
        nonlocal seen
        seen += 1
        if seen == failing + 1:
            raise BudgetInfeasible(budget_bytes=1000, minimum_bytes=1010, lower_bound_bytes=0)
        return gm.forward

    monkeypatch.setattr(step_profile.blocks, "backend", backend)
    before = blocks.profile.step
    draws = []
    for one in (model, plain):
        torch.manual_seed(0)
        one(inputs).backward()
        draws.append(torch.rand(1))
    assert blocks.profile.step != before
    assert same_bits(*draws)
    assert all(map(same_bits, model.buffers(), plain.buffers()))
    assert all(same_bits(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def sharded(rank: int) -> tuple[list[float], list[object], int]:
    """Losses, plans and compilations of a rank that trains sharded blocks."""
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")  # Dynamo's, about `.grad`
    model, inputs = layered(4)
    # Gloo's threads free up to two gathered shards late in the measured step: 7 % of its peak each.
    blocks = autoremat.compile_blocks(model.layers, 0.9, options=EAGER)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    losses = train(model, inputs, 4)
    return losses, [(plan.saved_bytes, len(graphs)) for _, plan, graphs in blocks.profile.variants], len(autoremat.reports())


@pytest.mark.slow
def test_ranks_with_sharded_blocks_train():
    for losses, variants, compilations in run_ranks(sharded, 2):
        assert 1 <= compilations <= 3
        assert sum(blocks for _, blocks in variants) == 4
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"blocks": []}, "is empty"), ({"blocks": [nn.Linear(2, 2), "layer"]}, "has a str"), ({"variants": 0}, "variants=0"),
        ({"options": {"memory_budget": 1}}, "argument of its own"), ({"options": {"in_flight": 2}}, "in_flight"),
    ],
)  # fmt: skip
def test_arguments_that_are_not_accepted(arguments, match):
    with pytest.raises(OptionsError, match=match):
        autoremat.compile_blocks(**{"blocks": nn.Sequential(nn.Linear(2, 2)), **arguments})


def test_blocks_within_blocks_and_compiled_modules_are_refused():
    model, _ = layered(2)
    with pytest.raises(OptionsError, match="block 0 contains block 1"):
        autoremat.compile_blocks([model, model.layers[0]])
    with pytest.raises(OptionsError, match=r"torch\.compile"):
        autoremat.compile_blocks([torch.compile(model)])
    blocks = autoremat.compile_blocks([model.layers[0], model.layers[0]], options=EAGER)
    assert len(blocks.blocks) == 1
    with pytest.raises(StepProfileError, match="two training steps"):
        blocks.within(0.5)


def test_a_difference_between_equal_blocks_is_a_warning():
    class Numbered(Block):
        def __init__(self, number: int) -> None:
            super().__init__(0.0)
            self.number = number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.number < 10 else x

    model, inputs = layered(2)
    model.layers = nn.ModuleList(Numbered(number) for number in range(2))
    blocks = compiled(model.layers, 1.0, lambda: model(inputs), **EAGER)
    assert len(set(blocks.profile.step.numbers)) == 1
    with pytest.warns(BudgetWarning, match=r"block 1 is compiled again.*TORCH_LOGS=recompiles"):
        model(inputs)
