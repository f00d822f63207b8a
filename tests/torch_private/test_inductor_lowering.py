"""Nothing moves past a kernel that is dear: an extern one, or a template, which autotuning makes. Nodes are stood in for."""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.dependencies import Dep
from torch._inductor.scheduler import BaseSchedulerNode, OutputNode

import autoremat
from autoremat.torch_private import inductor_lowering


@dataclass(eq=False)
class Node:
    """What the pinning asks of a node of Inductor's scheduler."""

    name: str
    template: bool = False
    reads: tuple[str, ...] = ()
    node: Any = None
    after: set[str] = field(default_factory=set)

    @property
    def read_writes(self) -> SimpleNamespace:
        return SimpleNamespace(reads=[SimpleNamespace(name=name) for name in self.reads])

    def is_template(self) -> bool:
        return self.template

    def get_name(self) -> str:
        return self.name

    def get_buffer_names(self) -> set[str]:
        return {self.name}

    def add_fake_dep(self, dependency: Dep) -> None:
        self.after.add(dependency.name)


def test_templates_are_kernels_that_nothing_passes():
    early, also_early, product = Node("early"), Node("also_early"), Node("product", template=True)
    epilogue, late, last = Node("epilogue", reads=("product",)), Node("late"), Node("last", template=True)
    nodes = [early, also_early, product, epilogue, late, last]
    assert all(hasattr(BaseSchedulerNode, name) for name in ("is_template", "get_name", "get_buffer_names", "add_fake_dep"))
    inductor_lowering._pin_order(SimpleNamespace(nodes=nodes))
    found = {node.name: node.after for node in nodes}
    assert found == {
        "early": set(),
        "also_early": set(),  # may be fused with the first
        "product": {"early", "also_early"},
        "epilogue": set(),  # reads the product; a false dependency would keep it from being fused into the template
        "late": {"product"},
        "last": {"product", "epilogue", "late"},
    }


class Residual(nn.Module):
    """A block whose backward adds to a gradient in place, after a weight's gradient has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x.sin())))


def results_last(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """A pass that observes no dependency of ours: it moves what only the graph's outputs use to the end."""

    def is_result(node: BaseSchedulerNode) -> bool:
        return all(isinstance(user.node, OutputNode) for buffer in node.get_outputs() for user in buffer.users)

    return sorted(nodes, key=is_result)


OVERLAPPED = {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": [results_last]}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "settings"), [("reduce-overhead", {}), (None, OVERLAPPED)])
@pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")
def test_code_in_which_results_could_move_to_the_end_computes_them(mode, settings):
    torch.manual_seed(0)
    model, x = nn.Sequential(Residual(), Residual(), Residual(), nn.Linear(32, 1)), torch.randn(512, 32)
    reference = copy.deepcopy(model)
    reference(x).square().mean().backward()
    autoremat.configure(memory_budget=0.8, cost_model="roofline", on_infeasible="best_effort")
    with inductor_config.patch(settings | {"fx_graph_cache": False}):
        torch.compile(lambda x: model(x).square().mean(), backend="autoremat", mode=mode)(x).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    report = autoremat.reports()[-1]
    assert report.fits == (not settings)  # a pass of the user may need more memory, and the report says so


@pytest.mark.slow
@pytest.mark.parametrize("device", [None, "H100"])
def test_the_code_of_a_resnet_under_half_of_its_peak_needs_what_its_plan_does(device):
    model, inputs = models.build("resnet", blocks=1)
    options = {"memory_budget": 0.5, "on_infeasible": "best_effort", "cost_model": "roofline"}
    report = autoremat.explain(model, *inputs, device=device, lower=True, advice=False, options=options)
    assert report.compiled_peak_bytes == report.predicted_peak_bytes + report.code_headroom_bytes
