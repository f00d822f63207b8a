"""Losses of two models: distillation, preferences and policies with a reference. Both logits are chunked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import seen
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from trained_steps import assert_close, compiled, gradients

import autoremat
from autoremat.basics.errors import OptionWarning

WORDS, LENGTH = 1024, 17


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(WORDS, width), nn.Linear(width, width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(ids).cumsum(1))))


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Forward Kullback-Leibler divergence at a temperature."""
    scores, wanted = F.log_softmax(student / 2, -1), F.log_softmax(teacher / 2, -1)
    return F.kl_div(scores, wanted, log_target=True, reduction="none").sum(-1).mean()


def distilled(logits: Tensor, teacher: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + divergence(logits, teacher)


def twice(logits: Tensor, teacher: Tensor, ids: Tensor) -> Tensor:
    """Selects the tokens of each term for itself."""
    entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return entropy + divergence(logits[:, :-1], teacher[:, :-1])


def scaled(logits: Tensor, teacher: Tensor, _: Tensor) -> Tensor:
    """Selects tokens after a cap and a temperature."""
    capped = 30 * torch.tanh(logits / 30)
    return divergence((capped / 0.9)[:, :-1], (teacher / 0.9)[:, :-1])


def mixed(logits: Tensor, teacher: Tensor, _: Tensor) -> Tensor:
    """Jensen-Shannon divergence."""
    one, other = logits.softmax(-1), teacher.softmax(-1)
    mean = ((one + other) / 2).log()
    return ((one * (one.log() - mean)).sum(-1) + (other * (other.log() - mean)).sum(-1)).mean()


def preferred(logits: Tensor, reference: Tensor, ids: Tensor) -> Tensor:
    """The loss of direct preference optimization; the last sequences are the rejected ones."""
    sums = [F.log_softmax(one, -1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1) for one in (logits, reference)]
    (chosen, rejected), (wanted, unwanted) = (one.chunk(2) for one in sums)
    return -F.logsigmoid(0.1 * ((chosen - rejected) - (wanted - unwanted))).mean()


def rewarded(logits: Tensor, reference: Tensor, ids: Tensor) -> Tensor:
    """The loss of group relative policy optimization, of the last tokens alone."""
    found = []
    for one in (logits, reference):
        one = one[:, -9:]
        found.append(one.gather(-1, ids[:, -9:, None]).squeeze(-1) - one.logsumexp(-1))
    policy, other = found
    ratio = (policy - policy.detach() - 0.05).exp()
    return (0.04 * ((other - policy).exp() - (other - policy) - 1) - torch.min(ratio, ratio.clamp(0.8, 1.2))).mean()


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
SLICED: dict[str, Loss] = {
    "distilled": distilled, "mixed": mixed, "preferred": preferred, "rewarded": rewarded,
}  # fmt: skip
WHOLE: dict[str, Loss] = {"twice": twice, "scaled": scaled}
QUICK = {"distilled", "twice"}


def networks() -> tuple[Network, Network, Tensor]:
    torch.manual_seed(0)
    return Network(16), Network(24).requires_grad_(False), torch.randint(WORDS, (4, LENGTH))


def step_of(function: Callable[..., Tensor], network: nn.Module, *args: Tensor, **options: Any) -> list[Tensor]:
    """The loss and the gradients of a step, eager without options."""
    return gradients(compiled(function, **options) if options else function, network, *args)


def in_one(loss: Loss, student: nn.Module, teacher: nn.Module, cut: int) -> Callable[[Tensor], Tensor]:
    def function(ids: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(ids)[:, : LENGTH - cut]
        return loss(student(ids)[:, : LENGTH - cut], wanted, ids)

    return function


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*SLICED, *WHOLE)]
)
def test_both_projections_are_chunked(name):
    student, teacher, ids = networks()
    function = in_one({**SLICED, **WHOLE}[name], student, teacher, int(name in SLICED))
    wanted = step_of(function, student, ids)
    found = step_of(function, student, ids, memory_budget=2**30, chunk_loss=4)
    report = autoremat.reports()[-1]
    assert report.loss_chunks == 4
    assert report.minimum_peak_bytes < 2 * 4 * LENGTH * WORDS * 4  # less than the logits of both
    assert_close(found, wanted)


def test_the_minimum_is_less_than_half():
    student, teacher, ids = networks()
    function = in_one(distilled, student, teacher, 1)
    found = []
    for chunks in (False, "auto"):
        with pytest.raises(BackendCompilerFailed) as caught:
            step_of(function, student, ids, memory_budget=1, chunk_loss=chunks)
        found.append(caught.value.inner_exception.minimum_bytes)
    assert found[1] < found[0] / 2
    step_of(function, student, ids, memory_budget=found[1])
    assert autoremat.reports()[-1].fits


@pytest.mark.parametrize("selects", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_logits_that_are_given_are_read_in_chunks(selects):
    student, teacher, ids = networks()
    given = teacher(ids) if selects else teacher(ids)[:, :-1]

    def function(ids: Tensor, given: Tensor) -> Tensor:
        return distilled(student(ids)[:, :-1], given[:, :-1] if selects else given, ids)

    wanted = step_of(function, student, ids, given)
    found = step_of(function, student, ids, given, memory_budget=2**30, chunk_loss=6)
    report = autoremat.reports()[-1]
    assert report.loss_chunks == 6
    assert report.minimum_peak_bytes < 4 * LENGTH * WORDS * 4  # less than the logits of one
    assert_close(found, wanted)


@pytest.mark.slow
def test_two_calls_of_one_model_are_two_regions():
    student, teacher, ids = networks()

    def score(network: nn.Module, ids: Tensor) -> Tensor:
        scores = network(ids)[:, :-1].log_softmax(-1)
        return scores.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)

    def function(chosen: Tensor, rejected: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = score(teacher, chosen) - score(teacher, rejected)
        return -F.logsigmoid(0.1 * (score(student, chosen) - score(student, rejected) - wanted)).mean()

    args = ids, ids.flip(0)[:, :-3].contiguous()
    wanted = step_of(function, student, *args)
    with seen() as captured:
        found = step_of(function, student, *args, memory_budget=2**30, chunk_loss=4)
    graph = captured.plan.graph
    assert max(graph.values[v].bytes for v in graph.forward_values) == LENGTH // 4 * 4 * WORDS * 4  # a quarter of 64 rows
    assert_close(found, wanted)


def test_the_error_says_why_a_loss_is_not_chunked():
    student, teacher, ids = networks()

    def function(ids: Tensor) -> Tensor:
        logits = student(ids)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + divergence(logits[:, :-1], teacher(ids)[:, :-1])

    with pytest.raises(BackendCompilerFailed, match=r"compute the loss token by token.*aten\.slice.*test_second_models"):
        step_of(function, student, ids, memory_budget=1)
    with pytest.warns(OptionWarning, match=r"aten\.slice.* takes other tokens"):
        step_of(function, student, ids, chunk_loss=2)
