"""The backend through `torch.compile`: what is obeyed, what is left alone, what is refused, what is reported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoremat
from autoremat import Report
from autoremat.compiler import rewriting

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")

ATEN = torch.ops.aten
LEAST = {"memory_budget": 1, "compiler": "aot_eager", "on_infeasible": "best_effort"}
UNBOUNDED = {"memory_budget": None, "compiler": "aot_eager"}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.fixture
def new_reports() -> Callable[[], list[Report]]:
    """Gives the reports since the test began."""
    before = len(autoremat.reports())
    return lambda: autoremat.reports()[before:]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list:
    """(forward, backward) FX modules of every graph that is planned from here on."""
    found: list = []
    original = rewriting.apply_plan

    def apply_plan(*arguments: object):
        found.append(original(*arguments))
        return found[-1]

    monkeypatch.setattr(rewriting, "apply_plan", apply_plan)
    return found


def compile_(function, options=None, **arguments):
    return torch.compile(function, backend="autoremat", options=LEAST if options is None else options, **arguments)


def policy(saved, context, op, *args, **kwargs):
    packet = getattr(op, "overloadpacket", op)
    return CheckpointPolicy.MUST_SAVE if packet in saved else CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize("options", [LEAST, UNBOUNDED], ids=["least", "unbounded"])
@pytest.mark.parametrize(
    ("saved", "again"),
    [({ATEN.mm, ATEN.addmm}, {ATEN.gelu}), ({ATEN.gelu, ATEN.sigmoid}, {ATEN.addmm})],
    ids=["products", "pointwise"],
)
def test_selective_checkpoint_policies_are_obeyed(modules, options, saved, again):
    model = Mlp()

    def region(x):
        return model.layers[1](F.gelu(model.layers[0](x))).sigmoid() * 2.0

    def step(x):
        contexts = partial(create_selective_checkpoint_contexts, partial(policy, saved))
        return model.layers[2](checkpoint(region, x, use_reentrant=False, context_fn=contexts)).square().mean()

    compile_(step, options)(torch.randn(8, 64)).backward()
    ((_, backward),) = modules
    inside = [n for n in backward.graph.nodes if "autoremat_recompute_of" in n.meta]
    packets = {getattr(n.target, "overloadpacket", None) for n in inside}
    # The last layer stands outside the region: nothing is ordered there. Its addmm is never needed again.
    assert not packets & saved
    assert packets & again


def test_inference_goes_untouched(modules, new_reports):
    model = Mlp()
    compiled = compile_(model)
    x = torch.randn(8, 64)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    assert not modules
    assert new_reports() == []


def test_dynamic_sizes_in_views_and_outputs(new_reports):
    weight = nn.Parameter(torch.randn(6, 6))

    def step(x):
        rows = x.shape[0]
        hidden = (x @ weight).view(rows * 2, 3).tanh().exp()
        return hidden.reshape(rows, 6) @ weight, rows + 1, hidden.expand(2, rows * 2, 3)

    compiled = compile_(step, dynamic=True)
    for rows in (4, 7):
        x = torch.randn(rows, 6)
        outputs, expected = compiled(x), step(x)
        weight.grad = None
        (outputs[0].sum() + outputs[2].sum()).backward()
        found, weight.grad = weight.grad, None
        (expected[0].sum() + expected[2].sum()).backward()
        torch.testing.assert_close(found, weight.grad)
        assert outputs[1] == rows + 1
    assert len(new_reports()) == 2  # up to 4 rows, and up to 8


@pytest.mark.parametrize("count", [1, 2])
def test_that_dynamo_traces_a_function_again_is_no_failure(count, monkeypatch):
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    from autoremat.compiler import dynamo_backend, split_budget

    def restart(*_: object) -> None:
        raise TensorifyScalarRestartAnalysis

    monkeypatch.setattr(dynamo_backend, "compile_graph", restart)
    monkeypatch.setattr(split_budget, "step_of", restart)
    raised = []

    def backend(gm, inputs):
        with pytest.raises(TensorifyScalarRestartAnalysis) as caught:
            dynamo_backend.backend(gm, inputs, options={"memory_budget": "1GiB", "early_gradients": count > 1 and count})
        raised.append(caught.value)
        return gm

    torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), backend=backend)(torch.randn(4, 8))
    assert len(raised) == 1
