"""Nothing moves past a kernel that is dear: an extern one, or a template, which autotuning makes. Nodes are stood in for."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch._inductor.dependencies import Dep
from torch._inductor.scheduler import BaseSchedulerNode

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
