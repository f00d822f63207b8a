"""Policies on a small transformer, uncompiled: what is recomputed is what the policy says, at the same bits."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from captured import Seen, planned
from oracles import NO_RECOMPUTATION, Outcome, differences, measured_step, train_step
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.basics.errors import BudgetInfeasible, ConstraintWarning

LAYERS, WIDTH, TOKENS, VOCABULARY = 3, 32, 24, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        weights = (q @ k.transpose(-1, -2)).mul(0.35).softmax(-1)
        if self.dropout:  # else a copy or nothing, as the version of torch has it
            weights = F.dropout(weights, self.dropout, self.training)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        for layer in self.layers:
            layer.attn.dropout = dropout

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return (F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()),)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def transformer() -> tuple[Transformer, torch.Tensor]:
    return Transformer(), tokens()


@dataclass(frozen=True)
class Ruled:
    """What a policy made of the transformer's step, and the measured peak of another step."""

    seen: Seen
    report: autoremat.Report
    measured_bytes: int


@pytest.fixture(scope="module")
def ruled(transformer) -> Callable[[str], Ruled]:
    @functools.cache
    def under(policy: str) -> Ruled:
        found, compiled = planned(*transformer, policy=policy)
        return Ruled(found, autoremat.reports()[-1], measured_step(compiled, transformer[0], transformer[1:]))

    return under


def again(seen: Seen) -> Counter[tuple[str, str]]:
    """How often each (module, op) runs again, modules without the number of their layer."""
    count: Counter[tuple[str, str]] = Counter()
    for module, target in seen.recomputed():
        parts = [part for part in module.split(".") if part not in ("layers", *map(str, range(LAYERS)))]
        count[".".join(parts), target.removeprefix("aten.").partition(".")[0]] += 1
    return count


CORE = {("attn", "bmm"), ("attn", "mul"), ("attn", "_softmax")}
LAYOUTS = {("attn", "clone")}
PROJECTIONS = {(f"attn.{name}_proj", "addmm") for name in "qkv"}
MLP = {("mlp.up", "addmm"), ("mlp.act", "gelu")}
NORMS = {("norm1", "native_layer_norm"), ("norm2", "native_layer_norm")}
LAYER = CORE | LAYOUTS | PROJECTIONS | MLP | NORMS | {("attn.o_proj", "addmm"), ("", "add")}
"""What of a layer its backward needs: all but the last product, whose result only the residual sum reads."""


@pytest.mark.parametrize(
    ("policy", "recomputed", "layers"),
    [
        ("full", LAYER, 3),
        pytest.param("block:1", LAYER, 1, marks=pytest.mark.slow),
        pytest.param("selective", CORE, 3, marks=pytest.mark.slow),
    ],
    ids=["full", "block", "core"],
)
def test_what_is_recomputed_is_what_the_policy_says(ruled, policy, recomputed, layers):
    found = ruled(policy)
    count = again(found.seen)
    assert set(count) == recomputed
    assert {number for key, number in count.items() if key[1] not in ("bmm", "clone")} == {layers}
    assert found.report.predicted_peak_bytes < found.report.baseline_peak_bytes
    assert found.measured_bytes <= found.report.predicted_peak_bytes <= 1.01 * found.measured_bytes


def test_a_layer_saves_only_its_input(ruled):
    in_layers = {(module, op) for module, op in ruled("full").seen.saved() if module.startswith("layers")}
    assert in_layers == {(f"layers.{i}", "aten.add.Tensor") for i in range(LAYERS)}  # the input of the next, or of the head


def outcome(model: nn.Module, compiled: Callable[..., object], batch: torch.Tensor) -> Outcome:
    return train_step(compiled, model, (batch,), seed=3)


def reference(model: nn.Module, batch: torch.Tensor) -> Outcome:
    torch._dynamo.reset()
    return outcome(model, torch.compile(model, backend=NO_RECOMPUTATION), batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*cannot be recomputed.*random.*:autoremat.basics.errors.ConstraintWarning")
def test_gradients_have_the_same_bits_with_dropout():
    model, batch = Transformer(dropout=0.3), tokens()
    expected = reference(model, batch)
    for policy in ("full", "uniform:2", "block:2", "segments:3", "selective:core_attn,layernorm"):
        seen, compiled = planned(model, batch, policy=policy)
        assert not differences(outcome(model, compiled, batch), expected), policy
        assert seen.plan.recomputed
        assert not any(target == "aten.native_dropout.default" for _, target in seen.recomputed())


@pytest.mark.slow
def test_under_a_budget_the_policy_holds_and_the_planner_does_the_rest(transformer, ruled):
    exact = ruled("block:1").seen
    budget = exact.plan.peak_bytes * 9 // 10
    seen, compiled = planned(*transformer, policy="block:1", memory_budget=budget)
    assert seen.plan.peak_bytes <= budget
    first = {module for module, _ in seen.recomputed() if module.startswith("layers.0")}
    assert first == {module for module, _ in exact.recomputed()}
    assert {module for module, _ in seen.recomputed()} > first
    assert measured_step(compiled, transformer[0], transformer[1:]) <= budget


def test_orders_that_no_budget_allows_say_what_they_cost(transformer):
    model, batch = transformer
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        planned(model, batch, save=["layers.*"], memory_budget=1)
    error = caught.value.inner_exception
    assert isinstance(error, BudgetInfeasible)
    assert error.unconstrained_bytes < 0.8 * error.minimum_bytes
    assert f"{error.unconstrained_bytes} bytes" in str(error)


def test_without_a_budget_orders_by_module_and_op_are_obeyed(transformer):
    seen, _ = planned(*transformer, save=["*.mlp"], recompute=["aten._softmax", "layers.1.norm2"])
    assert {("layers.1.norm2", "aten.native_layer_norm.default"), ("layers.0.attn", "aten._softmax.default")} <= set(
        seen.recomputed()
    )
    assert not any(".mlp" in module for module, _ in seen.recomputed())
    assert not any(target == "aten._softmax.default" for _, target in seen.saved())


def test_a_model_of_functions_has_layers_where_ops_repeat():
    weights = [torch.randn(16, 16).mul(0.3).requires_grad_() for _ in range(6)]

    def function(x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + F.gelu(F.layer_norm(x, (16,)) @ up) @ down
        return x.square().mean()

    seen, _ = planned(function, torch.randn(8, 16), policy="full")
    assert Counter(target for _, target in seen.recomputed()) == {
        "aten.native_layer_norm.default": 3, "aten.mm.default": 3, "aten.gelu.default": 3
    }  # fmt: skip


def test_a_model_without_layers_says_so():
    with pytest.warns(ConstraintWarning, match=r"Full\(\) has no effect on a graph of . forward ops: it has no layers"):
        planned(nn.Linear(4, 4), torch.randn(3, 4), policy="full")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        return sum(
            expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True) for number, expert in enumerate(self.experts)
        )


@pytest.mark.slow
def test_routing_is_never_chosen_again():
    model, batch = Transformer(), tokens()
    del model.layers[2]
    for layer in model.layers:
        layer.mlp = Experts()
    expected = reference(model, batch)
    for policy in ("full", "selective:moe"):
        with pytest.warns(
            ConstraintWarning, match=r"aten.topk.default in layers.0.mlp at .*: may not run twice \(discontinuous\)"
        ):
            seen, compiled = planned(model, batch, policy=policy)
        assert any("experts.3.up" in module for module, _ in seen.recomputed())
        assert not any("topk" in target for _, target in seen.recomputed())
        assert not differences(outcome(model, compiled, batch), expected)
    seen, _ = planned(model, batch, policy="selective:moe_act")
    assert Counter(target for _, target in seen.recomputed()) == {"aten.gelu.default": 8}


def test_the_models_own_checkpoints_and_options_add_up(transformer):
    model, batch = transformer

    def step(batch: torch.Tensor) -> torch.Tensor:
        x = checkpoint(model.layers[0], model.embed(batch), use_reentrant=False)
        return model.head(model.layers[2](model.layers[1](x))).square().mean()

    seen, _ = planned(step, batch, recompute=["*.layers.2.mlp"], save=["*.layers.0.mlp"])
    modules = {module.partition("layers.")[2] for module, _ in seen.recomputed()}
    assert {"0.attn.q_proj", "2.mlp.up"} <= modules
    assert not modules & {"0.mlp.up", "0.mlp.act"}


def test_calls_of_modules_are_numbered_not_addressed():
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    seen, _ = planned(lambda x: block(block(x)).square().mean(), torch.randn(2, 4))
    calls = {(scope.path, scope.call) for op in seen.plan.graph.ops for scope in op.scopes}
    assert calls == {(path, call) for path in ("block", "block.0", "block.1") for call in (0, 1)}
