"""Orders of users: checkpoint regions, repeated passes, writes, ops with several results, and names of tensors."""

from functools import partial

import pytest
import torch
from captured import planned
from models import Named
from oracles import NO_RECOMPUTATION, differences, measured_step, train_step
from torch import nn
from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoremat
from autoremat.basics.errors import ConstraintWarning


class Blocks(nn.Module):
    def __init__(self, passes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        self.passes = passes

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(self.passes):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
        return (x.square().mean(),)


def test_checkpoint_regions_hold_whatever_the_budget():
    model, x = Blocks(1), torch.randn(64, 32)
    for budget in (None, 0.97):
        seen, compiled = planned(model, x, memory_budget=budget)
        assert sum(target == "aten.gelu.default" for _, target in seen.recomputed()) == 3
        assert not differences(train_step(compiled, model, (x,)), train_step(reference(model), model, (x,)))


def test_a_second_pass_through_the_same_blocks_adds_only_its_inputs():
    x = torch.randn(64, 32)
    peaks = {}
    for passes in (1, 2):
        model = Blocks(passes)
        _, compiled = planned(model, x)
        peaks[passes] = measured_step(compiled, model, (x,))
    inputs = 4 * x.untyped_storage().nbytes()
    summed = sum(p.untyped_storage().nbytes() for p in model.blocks[0].parameters())  # the block's gradients of both passes
    assert peaks[2] <= peaks[1] + inputs + summed


def test_writes_inside_of_selective_checkpoints_are_kept():
    weight = torch.randn(32, 32, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight + 1.0
        y.mul_(2.0).add_(x)
        return torch.sin(y) @ weight

    def step(x: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])  # saves products
        return checkpoint(region, x, use_reentrant=False, context_fn=contexts).square().mean()

    x = torch.randn(8, 32)
    (expected,) = torch.autograd.grad(region(x).square().mean(), weight)
    for options in ({}, {"save": ["aten.sin"]}, {"recompute": ["aten.sin"], "memory_budget": 1.0}):
        _, compiled = planned(step, x, **options)
        (found,) = torch.autograd.grad(compiled(x), weight)
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore::autoremat.BudgetWarning")
@pytest.mark.parametrize("options", [{}, {"memory_budget": 1, "on_infeasible": "best_effort"}])
@pytest.mark.parametrize(("saved", "again"), [({"aten.addmm.default"}, "gelu"), ({"aten.gelu.default"}, "addmm")])
def test_selective_policies_are_obeyed(options, saved, again):
    layers, x = [nn.Linear(64, 64) for _ in range(3)], torch.randn(2048, 64)

    def decide(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if str(op) in saved else CheckpointPolicy.MUST_RECOMPUTE

    def step(x: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, decide)
        x = checkpoint(lambda x: layers[1](F.gelu(layers[0](x))).sigmoid(), x, use_reentrant=False, context_fn=contexts)
        return layers[2](x).square().mean()

    targets = {target for _, target in planned(step, x, **options)[0].recomputed()}
    assert not targets & saved
    assert f"aten.{again}.default" in targets


def with_tags(inner):
    """Returns ``inner`` with orders to save all of its results, as torch-remat gives them for a region that it keeps."""

    def run(*arguments):
        mode = get_proxy_mode()
        before = 0 if mode is None else len(mode.tracer.graph.nodes)
        result = inner(*arguments)
        for node in [] if mode is None else list(mode.tracer.graph.nodes)[before:]:
            if node.op == "call_function":
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return result

    return run


def test_tags_of_torch_remat_are_orders():
    up, down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16)

    def region(x: torch.Tensor) -> torch.Tensor:
        return down(torch.tanh(dynamo_bypassing_wrapper(with_tags, up, x)))

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(region, x, use_reentrant=False).square().mean()

    seen, compiled = planned(step, torch.randn(8, 16))
    again = [target for _, target in seen.recomputed()]
    assert "aten.tanh.default" in again, "the checkpointed region is recomputed"
    assert "aten.mm.default" not in again, "what the tags keep is not"


def test_an_op_with_several_results_may_be_ordered_either_way():
    norm, weight = nn.LayerNorm(32), torch.randn(32, 32, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        values, indices = F.gelu(norm(x) @ weight).max(-1)
        return (values * indices).square().mean()

    x = torch.randn(8, 32, requires_grad=True)
    (expected,) = torch.autograd.grad(step(x), x)
    for orders in ({"save": ["aten.native_layer_norm"]}, {"recompute": ["aten.native_layer_norm", "aten.gelu"]}):
        seen, compiled = planned(step, x, **orders)
        again = any(target == "aten.native_layer_norm.default" for _, target in seen.recomputed())
        assert again == ("recompute" in orders)
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)


def reference(model: nn.Module):
    torch._dynamo.reset()
    return torch.compile(model, backend=NO_RECOMPUTATION)


@torch.library.custom_op("autoremat_tests::shifted", mutates_args=())
def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + 1.0


shifted.register_fake(torch.empty_like)
shifted.register_autograd(lambda context, gradient: gradient)

once = {"dropout": lambda x: F.dropout(x, 0.5), "choice": lambda x: x.sort(-1)[0], "custom": shifted}


def checkpointed_step(kind: str, demanded: bool):
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)
    arguments = {"context_fn": contexts} if demanded else {}

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: once[kind](x.sin()).cos(), x, use_reentrant=False, **arguments).square().mean()

    return step


@pytest.mark.parametrize(
    ("kind", "demanded", "reason"),
    [
        ("dropout", True, r"aten.native_dropout.default at .*test_user_orders.py:\d+.*: may not run twice \(random\)"),
        ("custom", False, r"autoremat_tests.shifted.default at .*:\d+.* \(opaque; autoremat.declare_pure"),
    ],
)
def test_what_a_checkpoint_region_orders_in_vain_is_named(kind, demanded, reason):
    with pytest.warns(ConstraintWarning, match=reason):
        seen, compiled = planned(checkpointed_step(kind, demanded), torch.randn(64, 32, requires_grad=True))
    assert "aten.cos.default" in [target for _, target in seen.recomputed()]  # the rest is obeyed


@pytest.mark.parametrize("kind", ["dropout", "choice"])
def test_what_nearly_every_checkpointed_model_holds_is_no_warning(kind):
    seen, _ = planned(checkpointed_step(kind, False), torch.randn(64, 32, requires_grad=True))
    assert "aten.cos.default" in [target for _, target in seen.recomputed()]


def test_named_tensors_take_orders():
    x = torch.randn(4, 8)
    seen, _ = planned(Named(), x, save=["qkv"], recompute=["hidden"])
    assert seen.recomputed() == [("", "aten.gelu.default")]
    assert ("qkv", "aten.addmm.default") in seen.saved()
    seen, _ = planned(Named(), x, recompute=["qkv", "hid*"])
    assert ("qkv", "aten.addmm.default") in seen.recomputed()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_name_changes_nothing_elsewhere(backend):
    model, x = Named(), torch.randn(4, 8)
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(x).backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), expected))
    y = torch.randn(2, 2, requires_grad=True)
    assert autoremat.name(y, "y").grad_fn is None
