"""The projection and the loss in parts: the same numbers to float tolerance, a lower peak, and only where it is wanted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import planned
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from trained_steps import assert_close, largest_error, trained

import autoremat
from autoremat.basics.errors import OptionWarning
from autoremat.torch_private import MINOR

WORDS, WIDTH, BATCH, LENGTH = 320, 16, 3, 22

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of logits (batch, length, words) and labels (batch, length)."""


def flat(logits: Tensor, labels: Tensor, **keywords: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **keywords)


def shifted_as_transformers_does(logits: Tensor, labels: Tensor) -> Tensor:
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return flat(logits.float(), labels, ignore_index=-100)


def some_ignored(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, torch.where(labels % 3 == 0, 7, labels), ignore_index=7)


def sliced(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float()[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(30 * torch.tanh(logits / 30), labels)


def with_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels) + 1e-2 * logits.float().logsumexp(-1).square().mean()


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    losses = flat(logits, labels, reduction="none").view(BATCH, LENGTH)
    mask = (labels % 2).to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    scores = torch.log_softmax(logits, -1)
    return -scores.gather(-1, labels[..., None]).squeeze(-1).mean()


def with_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels) + 0 * (logits.argmax(-1) == labels).float().mean()


def with_noise(logits: Tensor, labels: Tensor) -> Tensor:
    """Two draws of one size: the first needs the losses of all tokens, the second does not."""
    losses = flat(logits, labels, reduction="none")
    return F.dropout(losses).mean() + (F.dropout(labels.flatten() * 0.1) * losses).mean()


LOSSES: dict[str, Loss] = {
    "mean": flat, "sum": lambda logits, labels: flat(logits, labels, reduction="sum") / 100,
    "weighted": lambda logits, labels: flat(logits, labels, weight=torch.linspace(0.5, 2.0, WORDS).to(logits.dtype)),
    "smoothed": lambda logits, labels: flat(logits, labels, label_smoothing=0.1), "some_ignored": some_ignored,
    "shifted": shifted_as_transformers_does, "sliced": sliced,
    "sliced_twice": lambda logits, labels: F.cross_entropy(logits[1:, 3:].flatten(0, 1), labels[1:, 3:].flatten()),
    "cropped": lambda logits, labels: F.cross_entropy(logits[..., : WORDS - 20].flatten(0, 1), labels.flatten() % 300),
    "capped": capped, "with_penalty": with_penalty, "masked": masked, "by_hand": by_hand, "with_accuracy": with_accuracy,
    "with_noise": with_noise,
}  # fmt: skip


class Model(nn.Module):
    """Embedding, a layer that mixes the tokens, and a projection."""

    def __init__(self, loss: Loss, bias: bool = False, tied: bool = False, words: int = WORDS) -> None:
        super().__init__()
        self.loss = loss
        self.embedding = nn.Embedding(words, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embedding(tokens).cumsum(1)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.head(self.hidden(tokens)), tokens)


def tokens_of(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, tokens: Tensor, **options: Any) -> tuple[list[Tensor], autoremat.Report]:
    """The loss and the gradients of one step, and its report; uncompiled graphs unless ``options`` say otherwise."""
    found = trained(model, model, tokens, steps=1, **options)
    return found.tensors, found.report


QUICK = {"mean", "shifted", "sliced", "capped", "masked", "by_hand", "with_accuracy", "with_noise"}
CASES = [
    *(pytest.param(name, False, False, marks=[pytest.mark.slow] * (name not in QUICK)) for name in LOSSES),
    *(pytest.param("shifted", *way, marks=pytest.mark.slow) for way in ((True, False), (False, True), (True, True))),
]


@pytest.mark.parametrize(("name", "bias", "tied"), CASES)
def test_the_numbers_are_the_same(name, bias, tied):
    model, tokens = Model(LOSSES[name], bias, tied), tokens_of()
    wanted, whole = train(model, tokens, chunk_loss=False)
    found, report = train(model, tokens, chunk_loss=4)
    assert (whole.loss_chunks, report.loss_chunks) == (1, 4)
    assert_close(found, wanted)


@pytest.mark.slow
def test_sums_of_halves_are_kept_in_floats():
    model, tokens = Model(shifted_as_transformers_does, bias=True).bfloat16(), tokens_of(4, 64)
    reference = Model(shifted_as_transformers_does, bias=True).double()
    reference.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    exact, _ = train(reference, tokens, chunk_loss=False)
    wanted, _ = train(model, tokens, chunk_loss=False)
    found, report = train(model, tokens, chunk_loss=8)
    assert report.loss_chunks == 8
    assert all(gradient.dtype == torch.bfloat16 for gradient in found[1:])
    assert largest_error(found, exact) < 1.5 * largest_error(wanted, exact)
    assert_close(found, wanted, rtol=2e-2, atol=2e-3)


@pytest.mark.slow
@settings(max_examples=5)
@given(batch=st.integers(1, 4), length=st.integers(2, 9), parts=st.integers(2, 12))
def test_any_number_of_rows_and_parts(batch, length, parts):
    torch.manual_seed(0)
    model, tokens = Model(flat), tokens_of(batch, length)
    wanted, _ = train(model, tokens, chunk_loss=False)
    found, report = train(model, tokens, chunk_loss=parts)
    assert 2 <= report.loss_chunks <= min(parts, batch * length)
    assert_close(found, wanted)


LARGE = 4096


def large(**options: bool) -> tuple[Model, Tensor]:
    """A model whose peak is its logits."""
    return Model(flat, words=LARGE, **options), tokens_of(4, 256)


def smallest(model: nn.Module, tokens: Tensor, **options: Any) -> int:
    """The smallest peak found, by the simulator."""
    _, report = train(model, tokens, memory_budget=2**40, **options)
    return report.minimum_peak_bytes


@pytest.fixture(scope="module")
def least() -> int:
    """The smallest peak of the large model with the loss in one piece."""
    return smallest(*large(), chunk_loss=False)


@pytest.mark.slow
def test_the_measured_peak_is_lower(least):
    model, tokens = large()
    whole = trained(model, model, tokens, memory_budget=least, chunk_loss=False)
    budget = least // 3
    found = trained(model, model, tokens, memory_budget=budget)
    report = found.report
    assert report.loss_chunks > 1
    assert found.peak <= budget < whole.peak / 2.5
    assert report.minimum_unchunked_bytes == least


def test_by_default_only_where_nothing_else_fits(least):
    model, tokens = large()
    wanted, whole = train(model, tokens, memory_budget=least)
    plain, _ = train(model, tokens)
    assert whole.loss_chunks == 1
    assert all(torch.equal(one, other) for one, other in zip(wanted, plain, strict=True))
    found, parts = train(model, tokens, memory_budget=least - 1)
    assert parts.loss_chunks > 1
    assert parts.fits
    assert_close(found, plain)


class Returning(Model):
    def forward(self, tokens: Tensor) -> Any:
        logits = self.head(self.hidden(tokens))
        return {"loss": self.loss(logits, tokens), "logits": logits}


def test_logits_that_are_returned_cannot_be_had_in_parts():
    compiled = torch.compile(Returning(flat), backend="autoremat", options={"compiler": "aot_eager", "chunk_loss": 4})
    with pytest.warns(OptionWarning, match="the caller is handed .* whole; return the loss alone"):
        compiled(tokens_of())
    assert autoremat.reports()[-1].loss_chunks == 1


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda logits, labels: flat(logits.softmax(1), labels), "mixes rows"),
        (lambda logits, labels: logits.square().mean(), "goes into no softmax"),
    ],
)
def test_a_loss_that_mixes_tokens_is_refused_with_the_reason(loss, reason):
    with pytest.warns(OptionWarning, match=f"chunk_loss has no effect on a graph: .*{reason}"):
        train(Model(loss), tokens_of(), chunk_loss=4)


def test_dynamic_sizes_are_refused():
    model, tokens = Model(flat), tokens_of()
    torch._dynamo.mark_dynamic(tokens, 1)
    with pytest.warns(OptionWarning, match="dynamic"):
        train(model, tokens, chunk_loss=4)


ADVICE = "compile with dynamic=False"


def test_the_advice_on_dynamic_sizes_leads_to_a_chunked_loss():
    model, short, long = Model(by_hand, words=LARGE), tokens_of(4, 32), tokens_of(4, 64)
    options = {"compiler": "aot_eager", "memory_budget": train(model, long, chunk_loss=False)[1].minimum_peak_bytes // 2}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="autoremat", options=options)
    compiled(short)
    with pytest.raises(BackendCompilerFailed, match=ADVICE):
        compiled(long)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="autoremat", dynamic=False, options=options)
    compiled(short)
    compiled(long)
    assert autoremat.reports()[-1].loss_chunks > 1


def test_a_stored_plan_of_parts_is_applied_to_parts(tmp_path):
    model, tokens = Model(flat), tokens_of()
    found, _ = planned(model, tokens, chunk_loss=4, memory_budget=0.5)
    autoremat.reports()[-1].plan.save(tmp_path / "plan.json")
    again, _ = planned(model, tokens, chunk_loss=4, plan=tmp_path / "plan.json")
    assert again.plan.schedule == found.plan.schedule


@pytest.mark.slow
def test_under_inductor_with_a_tied_weight():
    model, tokens = large(tied=True)
    options: dict[str, Any] = {"compiler": "inductor"}
    wanted, whole = train(model, tokens, **options, chunk_loss=False)
    budget = whole.predicted_peak_bytes // 3
    found = trained(model, model, tokens, **options, memory_budget=budget)
    assert found.report.loss_chunks > 1
    assert_close(found.tensors, wanted)
    assert found.peak <= budget


class ChunkedByTorch(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        options = nn.LinearCrossEntropyOptions(allow_retain_graph=True)
        rows = self.hidden(tokens).flatten(0, 1)
        return F.linear_cross_entropy(rows, self.head.weight, tokens.flatten(), options=options)


@pytest.mark.skipif(MINOR < 13, reason="torch has no F.linear_cross_entropy")
def test_a_loss_that_torch_chunks_is_not_chunked_again():
    model, tokens = ChunkedByTorch(flat, words=2 * LARGE), tokens_of(8, 128)
    with pytest.warns(OptionWarning, match="linear_cross_entropy computes the loss in chunks already"):
        _, report = train(model, tokens, chunk_loss=8, cost_model="roofline")
    assert report.loss_chunks == 1
    assert report.loss_chunked_by == "torch.nn.functional.linear_cross_entropy"


@pytest.mark.slow
def test_a_loss_that_inductor_chunks_is_not_chunked_again():
    model, tokens = Model(flat, words=2 * LARGE), tokens_of(16, 128)
    options = {"auto_chunker.enable": True, "auto_chunker.num_chunk": 4, "chunk_loss": 8, "cost_model": "roofline"}
    with pytest.warns(OptionWarning, match="Inductor .* computes the loss in chunks already"):
        report = autoremat.explain(model, tokens, options=options, lower=True)
    assert report.loss_chunked_by == "Inductor (auto_chunker.enable)"
    logits_of_a_chunk = tokens.numel() // 4 * 2 * LARGE * 4
    assert 2 * logits_of_a_chunk < report.compiled_peak_bytes, "with their gradient, inside of the region of a chunk"
