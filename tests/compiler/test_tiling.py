"""Row-by-row stretches in tiles: the same numbers to float tolerance, a lower peak, and only where it is wanted."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from trained_steps import LEAST, assert_close, gradients, largest_error, trained

import autoremat
from autoremat.basics.errors import OptionWarning

WIDTH, HIDDEN = 16, 64


class Gated(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, False), nn.Linear(width, hidden, False)
        self.down = nn.Linear(hidden, width, False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Plain(nn.Module):
    def __init__(self, dropout: float = 0.0, hidden_dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout, self.hidden_dropout = dropout, hidden_dropout

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.up(self.norm(x))), self.hidden_dropout)
        return x + F.dropout(self.down(y), self.dropout)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Between(nn.Module):
    def __init__(self, *inner: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(width, width), nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        for one in self.inner:
            x = one(x + torch.tanh(self.first(x).cumsum(1)))
        return x.cumsum(1).square().mean()


def rows_of(batch: int = 3, length: int = 22, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, length, width, generator=generator).to(dtype).requires_grad_()


def train(model: nn.Module, x: Tensor, **options: Any) -> tuple[list[Tensor], autoremat.Report]:
    """The loss, the gradients and the random state of one step, and its report."""
    found = trained(model, model, x, seed=5, steps=1, **options)
    return [*found.tensors, torch.get_rng_state()], found.report


@pytest.mark.parametrize(
    "inner",
    [
        lambda: [Gated()],
        lambda: [Plain()],
        lambda: [Packed()],
        lambda: [Plain(dropout=0.5), Plain(dropout=0.5, hidden_dropout=0.5)],  # masks are drawn as without tiles
    ],
)
def test_the_numbers_are_the_same(inner):
    model, x = Between(*inner()), rows_of()
    wanted, whole = train(model, x)
    found, report = train(model, x, tiles=4)
    assert (whole.tiles, report.tiles, report.tiled_stretches) == (1, 4, 1)
    assert_close(found, wanted)


class Reading(Gated):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden) + hidden.cumsum(1).mean(-1, keepdim=True)


def test_several_readers_and_frozen_weights():
    model, x = Between(Reading(), Gated()), rows_of()
    for frozen in (model.inner[0].gate, model.inner[1].up, model.inner[1].norm):
        frozen.requires_grad_(False)
    wanted, _ = train(model, x)
    found, report = train(model, x, tiles=3)
    assert report.tiled_stretches >= 1
    assert_close(found, wanted)


def test_sums_of_halves_are_kept_in_floats():
    model, x = Between(Gated()).bfloat16(), rows_of(4, 64, dtype=torch.bfloat16)
    reference = Between(Gated()).double()
    reference.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    exact, _ = train(reference, x.detach().double().requires_grad_())
    wanted, _ = train(model, x)
    found, report = train(model, x, tiles=8)
    assert report.tiled_stretches == 1
    assert largest_error(found[1:-1], exact[1:-1]) < 1.5 * largest_error(wanted[1:-1], exact[1:-1])


ACTIVATIONS = (F.silu, F.gelu, F.relu, F.softplus, F.leaky_relu, F.elu, torch.tanh, torch.sigmoid, F.hardswish, F.mish)


class Random(nn.Module):
    def __init__(self, choices: list[int]) -> None:
        super().__init__()
        norm, first, second, gate, bias, drops, reads = choices
        self.norm = (nn.Identity(), nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False))[norm]
        self.first, self.second = ACTIVATIONS[first], ACTIVATIONS[second]
        self.up, self.down = nn.Linear(WIDTH, 48, bool(bias)), nn.Linear(48, WIDTH, bool(bias))
        self.gate = nn.Linear(WIDTH, 48, bool(bias)) if gate else None
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.drops, self.reads = drops, reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        hidden = self.first(self.up(y))
        hidden = hidden * self.gate(y) if self.gate is not None else hidden
        if self.drops == 1:
            hidden = F.dropout(hidden, 0.3)
        out = self.second(self.down(hidden)) * self.scale
        if self.drops == 2:
            out = F.dropout(out, 0.3)
        if self.reads == 1:
            out = out + hidden.mean(-1, keepdim=True)
        return x + out if self.reads != 2 else out * hidden.sum((0, 1)).mean()


CHOICES = st.tuples(*[st.integers(0, most) for most in (3, 9, 9, 1, 1, 2, 2)]).map(list)


@settings(max_examples=6)
@given(choices=CHOICES, batch=st.integers(1, 3), length=st.integers(2, 9), tiles=st.integers(2, 7))
def test_any_stretch_in_any_number_of_tiles(choices, batch, length, tiles):
    torch.manual_seed(0)
    model, x = Between(Random(choices)), rows_of(batch, length)
    wanted, _ = train(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptionWarning)  # wide borders may leave no stretch
        found, _ = train(model, x, tiles=tiles)
    assert_close(found, wanted)


def large() -> tuple[nn.Module, Tensor]:
    """A model whose peak is its hidden values."""
    return Between(Gated(32, 256), width=32), rows_of(4, 256, 32)


@pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")
def test_the_measured_peak_is_lower():
    model, x = large()
    whole, tiled = trained(model, model, x, **LEAST), trained(model, model, x, **LEAST, tiles=8)
    assert tiled.report.tiled_stretches == 1
    assert tiled.peak <= tiled.report.predicted_peak_bytes < whole.peak / 2
    assert_close(tiled.tensors, whole.tensors, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_the_measured_peak_is_lower_under_inductor():
    model, x = large()
    options = {"compiler": "inductor", "chunk_loss": False}
    budget = autoremat.explain(model, x, options=LEAST | options).minimum_peak_bytes // 2
    tiled = trained(model, model, x, memory_budget=budget, **options, tiles=4)
    assert tiled.report.tiled_stretches == 1
    assert tiled.peak <= budget
    assert_close(tiled.tensors, gradients(model, model, x), rtol=1e-4, atol=1e-3)


def test_auto_tiles_only_where_nothing_else_fits():
    model, x = large()
    _, report = train(model, x, memory_budget=2**40, cost_model="roofline")
    least = report.minimum_peak_bytes
    wanted, whole = train(model, x, memory_budget=least, tiles="auto", cost_model="roofline")
    assert whole.tiles == 1
    found, tiled = train(model, x, memory_budget=least * 2 // 3, tiles="auto", cost_model="roofline")
    assert tiled.tiles > 1
    assert tiled.fits
    assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    with pytest.raises(BackendCompilerFailed, match="memory_budget"):
        train(model, x, memory_budget=least * 2 // 3, cost_model="roofline")


def test_what_cannot_be_tiled_is_said():
    x = rows_of()
    torch._dynamo.mark_dynamic(x, 1)
    for model, rows in ((Between(nn.Linear(WIDTH, WIDTH)), rows_of()), (Between(Gated()), x)):
        with pytest.warns(OptionWarning, match="tiles has no effect on a graph"):
            _, report = train(model, rows, tiles=4)
        assert report.tiles == 1


class WithWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Gated(), nn.Linear(WIDTH, 320, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.layer(x.cumsum(1)))
        return F.cross_entropy(logits.flatten(0, 1), torch.arange(logits.shape[0] * logits.shape[1]) % 320)


def test_the_projection_onto_words_is_left_to_the_chunked_loss():
    model, x = WithWords(), rows_of()
    wanted, _ = train(model, x)
    found, report = train(model, x, tiles=3, chunk_loss=5)
    assert (report.tiles, report.tiled_stretches, report.loss_chunks) == (3, 1, 5)
    assert_close(found, wanted)
