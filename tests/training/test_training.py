"""The steps of ``training_steps`` under a budget that nothing fits have the bits of the same graphs without recomputation."""

import pytest
import torch
from oracles import NO_RECOMPUTATION, same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from trained_steps import gradients
from training_models import FAMILIES, STEPS
from training_steps import layers, rows

import autoremat

LEAST = {"memory_budget": 1, "compiler": "aot_eager", "on_infeasible": "best_effort", "chunk_loss": False}  # chunks round

AT_LEAST_ALREADY = {"nothing_in_the_batch", "batch_norm", "writing_in_place", "experts_broken"}
"""Steps that need no less memory under any plan: gradients, or what is written to, make their peak."""

SLOW = {
    "complex_numbers", "mapped_over_a_batch", "autocast_float16", "spectral_norm", "weight_norm", "channels_last",
    "module_used_twice", "called_several_times", "instance_norm", "float64", "low_rank_adapters",
    "language_model_with_cache", "experts_whole", "two_towers", "recurrent_layers",
    "random_numbers", "experts_broken", "with_other_parameters", "gradient_inside", "without_gradient_in_between",
    "writing_in_place", "autocast_bfloat16", *FAMILIES,
}  # fmt: skip

# What torch says of these steps under any backend.
pytestmark = [
    pytest.mark.filterwarnings("ignore::autoremat.basics.errors.ConstraintWarning"),
    pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Torchinductor does not support code generation for complex:UserWarning"),
]


def numbers(name: str, backend: str, **arguments: object) -> list[Tensor]:
    """What the step gives with a backend; the seed is the same each time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return STEPS[name](lambda function: torch.compile(function, backend=backend, **arguments))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in STEPS])
def test_recomputation_changes_no_bit(name: str) -> None:
    expected = numbers(name, NO_RECOMPUTATION)
    if not recomputed_with_the_same_bits(name, expected, LEAST) and name not in AT_LEAST_ALREADY:
        # No plan needs less memory, as of small models whose gradients make the peak: so recomputation is ordered.
        assert recomputed_with_the_same_bits(name, expected, LEAST | {"recompute": ["*"]}) > 0


def recomputed_with_the_same_bits(name: str, expected: list[Tensor], options: dict[str, object]) -> int:
    """How many ops run again in a step whose numbers have the expected bits."""
    before = len(autoremat.reports())
    found = numbers(name, "autoremat", options=options)
    assert len(found) == len(expected)
    wrong = [index for index, pair in enumerate(zip(found, expected, strict=True)) if not same_bits(*pair)]
    assert not wrong
    assert all(torch.isfinite(torch.view_as_real(t) if t.is_complex() else t).all() for t in found)
    return sum(report.recomputed_ops for report in autoremat.reports()[before:])


def test_a_tensor_subclass_trains() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def run(**arguments: object) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = layers(), TwoTensor(rows(), rows()).requires_grad_()
        loss = torch.compile(lambda x: model(x).exp().mean(), **arguments)(x)
        loss.backward()
        return [t.detach() for held in (loss, x.grad) for t in (held.a, held.b)] + [p.grad for p in model.parameters()]

    expected = run(backend=NO_RECOMPUTATION)
    found = run(backend="autoremat", options=LEAST)
    assert all(
        type(t) is type(e) and same_bits(getattr(t, "a", t), getattr(e, "a", e)) for t, e in zip(found, expected, strict=True)
    )
    assert autoremat.reports()[-1].recomputed_ops > 0


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x).tanh(), 0.2)
            x = x * torch.bernoulli(torch.full_like(x, 0.9)) + 0.1 * torch.rand_like(x)
        return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.2).exp().mean()


@pytest.mark.slow
@pytest.mark.parametrize("fallback", [False, True])
def test_random_numbers_under_inductor(fallback: bool) -> None:
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(32, 64)
    plain = torch.compile(model, backend="inductor", options={"fallback_random": fallback})
    expected = gradients(plain, model, x)
    torch._dynamo.reset()
    options = {"memory_budget": 1, "on_infeasible": "best_effort", "fallback_random": fallback}
    compiled = torch.compile(model, backend="autoremat", options=options)
    found, again = gradients(compiled, model, x), gradients(compiled, model, x)
    assert autoremat.reports()[-1].recomputed_ops > 0
    for mine, second, reference in zip(found, again, expected, strict=True):
        assert same_bits(mine, second)
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)
    if fallback:
        for mine, eager in zip(found, gradients(model, model, x), strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-6)
