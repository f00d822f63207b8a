"""Private names and versions of torch: modules import, names are there in their versions, and what torch has changed."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo.variables.streams  # noqa: F401  # registers the ops of streams
import torch.distributed._functional_collectives  # noqa: F401  # registers the collectives
import torch.distributed.tensor  # noqa: F401  # imported here, because its first use warns of other packages
from layers import SOURCES
from oracles import same_bits
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoremat
from autoremat.basics.environment import NEWER_TORCH
from autoremat.basics.errors import SUPPORTED_MINORS, CaptureError, ConstraintWarning, OptionWarning, UnsupportedTorchError
from autoremat.torch_private import MINOR, VERSIONS, check_torch_version, resolve


@pytest.mark.parametrize("module", [module for module in SOURCES if module and module != "__main__"])
def test_every_module_imports_on_this_torch(module):
    importlib.import_module(f"autoremat.{module}")


@pytest.mark.parametrize("place", VERSIONS)
def test_a_name_is_there_in_its_versions_and_in_no_other(place, monkeypatch):
    is_expected = MINOR in VERSIONS[place]
    monkeypatch.setitem(VERSIONS, place, range(99))
    try:
        resolve(place)
        is_there = True
    except (AttributeError, ImportError):
        is_there = False
    assert is_there == is_expected


RESOLVED_LATER = "torch._inductor.virtualized.V"
"""Its attributes exist while Inductor compiles."""


def used_names(module: str) -> set[str]:
    """Returns the names of torch that a module imports, with the attributes that it reads of them."""
    tree = ast.parse(Path(importlib.import_module(module).__file__).read_text())
    bound = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            bound.update({one.asname or one.name: f"{node.module}.{one.name}" for one in node.names})
        elif isinstance(node, ast.Import):
            bound.update({one.asname: one.name for one in node.names if one.asname and one.name.startswith("torch")})
    names = set(bound.values())
    for node in ast.walk(tree):
        path = list[str]()
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if path and isinstance(node, ast.Name) and node.id in bound and bound[node.id] != RESOLVED_LATER:
            names.add(".".join([bound[node.id], *path]))
    return names


@pytest.mark.parametrize("module", sorted(name for name in SOURCES if name.startswith("torch_private")))
def test_every_name_of_torch_that_a_module_reads_is_there(module):
    missing = []
    for name in used_names(f"autoremat.{module}"):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            missing.append(name)
    assert not missing


OLDER, NEWER = f"2.{SUPPORTED_MINORS[0] - 1}.1", f"2.{SUPPORTED_MINORS.stop}.0.dev20990101+cpu"


@pytest.mark.parametrize("version", [f"2.{minor}.0" for minor in SUPPORTED_MINORS])
def test_supported_versions(version):
    check_torch_version(version)


@pytest.mark.parametrize("version", [OLDER, NEWER, "1.13.1", "3.12.0", "main"])
def test_other_versions_are_refused(version):
    with pytest.raises(UnsupportedTorchError, match=version.split("+")[0]):
        check_torch_version(version)


def test_later_versions_come_in_on_request_and_earlier_ones_never_do(monkeypatch):
    monkeypatch.setenv(NEWER_TORCH, "1")
    check_torch_version(NEWER)
    with pytest.raises(UnsupportedTorchError):
        check_torch_version(OLDER)
    monkeypatch.setenv(NEWER_TORCH, "0")
    with pytest.raises(UnsupportedTorchError):
        check_torch_version(NEWER)


UNCOMPILED = {"compiler": "aot_eager", "on_planning_error": "raise"}
LEAST = {**UNCOMPILED, "memory_budget": 1, "on_infeasible": "best_effort"}
ROWS, SIZE = 64, 32

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")

ran: list[str] = []
"""The calls of the custom ops below, by name."""


@torch.library.custom_op("versions::costly_sine", mutates_args=())
def costly_sine(x: Tensor) -> Tensor:
    ran.append("costly_sine")
    return x.sin()


@torch.library.custom_op("versions::spoken", mutates_args=())
def spoken(x: Tensor) -> Tensor:
    ran.append("spoken")
    return x.clone()


for op in (costly_sine, spoken):
    op.register_fake(torch.empty_like)
spoken.register_autograd(lambda _, gradient: gradient * 1)
_register_effectful_op(torch.ops.versions.spoken.default, _EffectType.ORDERED)


def gradients(compiled: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    ran.clear()
    fresh = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    compiled(*fresh).sum().backward()
    return [tensor.grad for tensor in fresh]


def compile_(function: Callable[..., Tensor], backend: str = "autoremat", **options: object) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, options=options or None)


class SineComputedAgain(torch.autograd.Function):
    """Row sums of sines, whose backward computes the sines again rather than save them."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.versions.costly_sine(x).sum(-1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient[:, None] * torch.cos(torch.ops.versions.costly_sine(x))


@pytest.mark.skipif("extra_node_key" not in inspect.signature(fx_graph_cse).parameters, reason="this torch merges such calls")
def test_what_a_model_computes_again_in_its_backward_is_not_saved():
    x, weight = torch.randn(ROWS, SIZE), torch.randn(SIZE, SIZE)
    compiled = compile_(lambda x, weight: SineComputedAgain.apply(torch.tanh(x @ weight)), **LEAST)
    gradients(compiled, x, weight)
    assert ran == ["costly_sine"] * 2
    assert autoremat.reports()[-1].saved_bytes == x.nbytes


def region(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(torch.ops.versions.spoken(torch.tanh(x @ weight)) @ weight)


def test_an_effect_that_is_ordered_to_run_again_runs_once_and_says_so():
    x, weight = torch.randn(ROWS, SIZE), torch.randn(SIZE, SIZE)
    expected = gradients(compile_(region, "aot_eager"), x, weight)
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)
    checkpointed = compile_(lambda *inputs: checkpoint(region, *inputs, use_reentrant=False, context_fn=contexts), **LEAST)
    with pytest.warns(ConstraintWarning, match=r"versions.spoken.* runs once"):
        found = gradients(checkpointed, x, weight)
    assert ran == ["spoken"]
    assert all(map(same_bits, found, expected))


@pytest.mark.skipif(not hasattr(torch.ops.streams, "record_event"), reason="this torch records no events in graphs")
def test_graphs_with_streams_are_left_to_torch():
    def waiting(x: Tensor, weight: Tensor) -> Tensor:
        x = torch.tanh(x @ weight)
        torch.ops.streams.record_event(0, 0)
        torch.ops.streams.wait_event(0, 1)
        return torch.tanh(x @ weight)

    x = torch.randn(ROWS, SIZE, requires_grad=True)
    with pytest.raises(CaptureError, match="stream"):
        autoremat.explain(waiting, x, torch.randn(SIZE, SIZE), options=UNCOMPILED)


def chain(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(torch.sin(x @ weight))
    return x


def test_a_budget_of_torchs_configuration_has_no_effect_and_says_so():
    x, weight = torch.randn(ROWS, SIZE), torch.randn(SIZE, SIZE)
    expected = gradients(compile_(chain, **UNCOMPILED), x, weight)
    before = autoremat.reports()[-1]
    with functorch_config.patch(activation_memory_budget=0.25), pytest.warns(OptionWarning, match="=0.25 has no effect"):
        assert all(map(same_bits, gradients(compile_(chain, **UNCOMPILED), x, weight), expected))
    assert autoremat.reports()[-1].saved_bytes == before.saved_bytes


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="this torch has no such regions"
)
def test_a_budget_of_a_region_has_no_effect_and_says_so():
    def bounded(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autograd.graph.region_activation_memory_budget(0.25):
            return chain(x, weight)

    x, weight = torch.randn(ROWS, SIZE, requires_grad=True), torch.randn(SIZE, SIZE)
    free = autoremat.pareto(chain, x, weight, points=2, torch_budgets=(1.0,), options=UNCOMPILED)
    with pytest.warns(OptionWarning, match="=0.25 has no effect"):
        bound = autoremat.pareto(bounded, x, weight, points=2, torch_budgets=(1.0,), options=UNCOMPILED)
    assert bound == free
    with pytest.warns(OptionWarning, match="=0.25 has no effect"):
        gradients(compile_(bounded, **UNCOMPILED), x, weight)
