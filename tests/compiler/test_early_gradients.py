"""Early gradients: a graph in parts, without its dead code, with hooks between the backwards and the whole graph's bits."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._functorch.config
from block_models import Chain
from oracles import same_bits
from processes import run_ranks
from sharded_models import shard_weights
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, find_cause
from autoremat.planner.multigraph.ledger import Part, moments_of

EAGER = {"compiler": "aot_eager", "cost_model": "roofline"}
WIDTH, ROWS = 128, 16
LAYER_BYTES = 4 * (4 * WIDTH * WIDTH + 2 * WIDTH)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1)


class Layers(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Mixed(Layers):
    def __init__(self) -> None:
        super().__init__(2)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = torch.relu_(norm(layer(x)))
            return nn.functional.linear(x, self.layers[0].up.weight).float().square().mean()


@dataclass
class Hooks:
    """An optimizer for each parameter, that steps in the backward."""

    model: nn.Module
    frees: bool = True

    def __post_init__(self) -> None:
        self.optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in self.model.parameters()}
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        self.optimizers[parameter].step()
        if self.frees:
            parameter.grad = None


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH)


@dataclass
class Trained:
    """Three steps: their losses, the tensors of the model and of the hooks afterwards, and the peak of the last one."""

    losses: list[Tensor]
    state: list[Tensor]
    peak: int
    reports: list[autoremat.Report]

    def equals(self, other: "Trained") -> bool:
        """True if all bits are those of ``other``."""
        return all(map(same_bits, self.losses + self.state, other.losses + other.state))


def train(make: Callable[[], nn.Module], hooks: Callable[[nn.Module], Any] = Hooks, **options: Any) -> Trained:
    """Trains a model of ``make`` with ``hooks``, by aot_eager with ``options``, or as it is without any."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make()
    hooks(model)
    before = len(autoremat.reports())
    ours: dict[str, Any] = {"backend": "autoremat", "options": EAGER | options}
    step = torch.compile(model, **(ours if options else {"backend": "aot_eager"}))
    losses = []
    for number in range(3):
        torch.manual_seed(number)
        x = batch()
        with autoremat.track_peak("cpu") as peak:
            loss = step(x)
            loss.backward()
        losses.append(loss.detach())
        del loss
    state = [one.to_local() if hasattr(one, "to_local") else one for one in (*model.parameters(), *model.buffers())]
    return Trained(losses, [one.detach().clone() for one in state], peak.bytes, autoremat.reports()[before:])


class InPlace(Layers):
    """No cut separates the tensor from its changes."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.clone()
        for layer in self.layers:
            total += layer(x)
        return total.square().mean()


class Mapped(Layers):
    """No cut lies inside of the transform."""

    def forward(self, x: Tensor) -> Tensor:
        def all_layers(row: Tensor) -> Tensor:
            for layer in self.layers:
                row = layer.down(layer.up(row))
            return row

        return torch.func.vmap(all_layers)(x).mean()


@pytest.mark.parametrize(("make", "parts"), [(Mixed, 2), (InPlace, 1), (Mapped, 1)])
def test_steps_in_parts_have_the_bits_of_the_whole_graph(make, parts):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if parts == 1 else "error")  # of hooks beside a whole graph
        found = train(make, memory_budget=1 << 30, early_gradients=2)
    assert found.equals(train(make))
    assert len(found.reports) == parts
    assert all("for early gradients" in report.notes[0] for report in found.reports if parts == 2)


def test_gradients_that_hooks_free_are_not_live_together():
    whole = train(Layers, early_gradients=False)
    found = train(Layers, memory_budget=1 << 30, hooks_free_gradients=True, early_gradients=4)
    assert found.equals(whole)
    assert (len(whole.reports), len(found.reports)) == (1, 4)
    assert whole.peak > 4 * LAYER_BYTES
    assert found.peak < 0.6 * whole.peak  # one layer's gradients and a hook's temporaries
    assert "gradients count as freed" in found.reports[0].notes[0]


def thin() -> Chain:
    return Chain(8, WIDTH, bias=False)


def minimum(make: Callable[[], nn.Module] = Layers, **options: Any) -> BudgetInfeasible:
    with pytest.raises(Exception, match="parts for early gradients together") as caught:
        train(make, memory_budget=1000, **options)
    error = find_cause(caught.value, BudgetInfeasible)
    assert error is not None
    return error


def test_the_ledger_counts_gradients_as_freed_if_the_user_says_so_and_the_minimum_holds():
    kept, freed = (minimum(early_gradients=4, hooks_free_gradients=frees) for frees in (False, True))
    assert kept.minimum_bytes > 4 * LAYER_BYTES
    assert freed.minimum_bytes < 0.6 * kept.minimum_bytes
    trained = train(Layers, memory_budget=freed.minimum_bytes, hooks_free_gradients=True, early_gradients=4)
    assert 0.8 * freed.minimum_bytes <= trained.peak <= freed.minimum_bytes


def test_more_parts_need_less_and_the_error_says_so():
    four, eight = (minimum(thin, hooks_free_gradients=True, early_gradients=number) for number in ("auto", 8))
    assert eight.minimum_bytes < four.minimum_bytes
    finer = train(thin, memory_budget=eight.minimum_bytes, hooks_free_gradients=True, early_gradients=8)
    assert [report.notes[0].partition(" for")[0] for report in finer.reports] == [f"part {n} of 8" for n in range(1, 9)]
    assert finer.peak <= eight.minimum_bytes
    assert finer.equals(train(thin, early_gradients=False))


@pytest.mark.parametrize("options", [{"early_gradients": False}, {"in_flight": 2}])
def test_optimizers_in_hooks_beside_a_whole_graph_are_warned_of(options):
    with pytest.warns(BudgetWarning, match="a hook allocates up to .* early_gradients=True runs the hooks between parts"):
        assert len(train(lambda: Layers(2), memory_budget=1 << 30, **options).reports) == 1


def test_gradients_that_stay_although_they_count_as_freed_are_warned_of():
    with pytest.warns(BudgetWarning, match="the hooks leave 16 of 16 gradients") as caught:
        train(Layers, lambda model: Hooks(model, frees=False), memory_budget=1 << 30, hooks_free_gradients=True)
    assert sum("hooks leave" in str(one.message) for one in caught) == 1


@torch._functorch.config.patch(donated_buffer=False)  # which excludes retain_graph
def test_other_sizes_and_a_kept_graph_have_the_same_gradients():
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Layers(2)
    plain = torch.compile(model, backend="aot_eager", dynamic=True)
    planned = torch.compile(
        model, backend="autoremat", dynamic=True, options=EAGER | {"early_gradients": 2, "memory_budget": "1GiB"}
    )

    def gradients(step: Callable[[Tensor], Tensor], rows: int) -> list[Tensor]:
        torch.manual_seed(rows)
        x = batch(rows).requires_grad_()
        loss = step(x)
        for _ in range(2):
            loss.backward(retain_graph=True)
        found = [p.grad for p in (x, *model.parameters())]
        model.zero_grad()
        return found

    for rows in (16, 9):
        assert all(map(same_bits, gradients(planned, rows), gradients(plain, rows)))


def sharded(by_layer: bool) -> Layers:
    model = Layers()
    for layer in model.layers if by_layer else ():
        fully_shard(layer)
    fully_shard(model)
    return model


@dataclass
class OnRank:
    """What one rank finds: peaks of steps, numbers of reports, bytes that the least plans need, and whether bits are equal."""

    peaks: dict[str, int]
    reports: dict[str, int]
    least: dict[str, int]
    same_bits: bool


def train_shards(rank: int) -> OnRank:
    """Trains shards with an optimizer in the backward. The last two ways gather the weights inside of the graph."""
    least = {"memory_budget": 1000, "on_infeasible": "best_effort", "hooks_free_gradients": True}
    trained = {
        "layers": train(lambda: sharded(by_layer=True), early_gradients="auto"),
        "root": train(lambda: sharded(by_layer=False), early_gradients="auto"),
        "gathers": train(lambda: shard_weights(Layers()), early_gradients=False, **least),
        "gathers in parts": train(lambda: shard_weights(Layers()), **least),
    }
    whole, part = trained["gathers"].reports[0], trained["gathers in parts"].reports[0]
    return OnRank(
        {name: one.peak for name, one in trained.items()},
        {name: len(one.reports) for name, one in trained.items()},
        {"gathers": whole.predicted_peak_bytes + whole.code_headroom_bytes, "gathers in parts": part.budget_bytes or 0},
        trained["gathers in parts"].equals(trained["gathers"]),
    )


@pytest.mark.slow
def test_gradients_leave_by_group_of_fully_shard_and_by_part_where_the_graph_gathers():
    for rank in run_ranks(train_shards, 2):
        assert rank.peaks["layers"] < 0.6 * rank.peaks["root"]  # whose gradients are reduced together
        assert (rank.reports["root"], rank.reports["gathers"], rank.reports["gathers in parts"]) == (1, 1, 4)
        assert rank.least["gathers in parts"] < rank.least["gathers"]  # the parts gather weights again, as the whole does
        assert all(rank.peaks[way] <= size for way, size in rank.least.items())
        assert rank.same_bits


def test_freed_gradients_count_right_after_the_backward_of_their_part_alone():
    parts = (Part(0, finished_bytes=3, freed_bytes=7), Part(1, freed_bytes=9))
    base = [(m.running, m.base_bytes) for m in moments_of(parts, ())]
    assert base[-4:] == [(1, 0), (None, 9), (0, 0), (None, 3 + 7)]


F = nn.functional
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
Dead = Callable[["Net", Tensor, Tensor], Any]


class Net(nn.Module):
    def __init__(self, dead: Dead) -> None:
        super().__init__()
        self.layers, self.norm, self.dead = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.BatchNorm1d(16), dead
        self.embedding = nn.Embedding(8, 16, max_norm=0.1)
        self.register_buffer("kept", torch.zeros(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        h = F.dropout(self.layers[1](self.layers[0](x).relu()), 0.5)
        h = F.dropout(self.layers[2](h), 0.5)
        self.dead(self, noise, h)
        return self.layers[3](h).square().mean()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


square = Square.apply
DEAD: dict[str, Dead] = {
    "product": lambda net, noise, h: net.layers[3](h) * noise,
    "changes a dead tensor": lambda net, noise, h: F.relu(h.sin().add_(noise), inplace=True).__setitem__(0, noise[0]),
    "checkpoint": lambda net, noise, h: checkpoint(lambda a, b: F.dropout(a * b).sin(), h, noise, use_reentrant=False),
    "function": lambda net, noise, h: square(h * noise),
}  # fmt: skip
EFFECTS: dict[str, Dead] = {
    "running statistics": lambda net, noise, h: net.norm(h * noise),
    "running statistics in a checkpoint": lambda net, noise, h: checkpoint(net.norm, h * noise, use_reentrant=False),
    "changes a view of a buffer": lambda net, noise, h: net.kept[2:4].mul_(2).add_(noise[:2]),
    "changes a parameter": lambda net, noise, h: net.embedding(torch.arange(8)) * noise,
}


def trained(dead: Dead, backend: str, **options: Any) -> list[Tensor]:
    """One step: gradients, state and the next random number."""
    torch.compiler.reset()
    torch.manual_seed(0)
    net = Net(dead)
    given = {"backend": backend} | ({"options": options} if options else {})
    torch.compile(net, **given)(torch.ones(8, 16)).backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [*gradients, *net.buffers(), net.embedding.weight.detach(), torch.rand(1)]


@pytest.mark.parametrize("name", DEAD | EFFECTS)
def test_parts_draw_and_change_what_the_whole_graph_does(name):
    dead = (DEAD | EFFECTS)[name]
    before = len(autoremat.reports())
    parts = trained(dead, "autoremat", compiler="aot_eager", cost_model="roofline", early_gradients=3)
    assert len(autoremat.reports()) - before > 1
    whole = trained(dead, "aot_eager")
    assert len(parts) == len(whole)
    assert all(map(same_bits, parts, whole))
