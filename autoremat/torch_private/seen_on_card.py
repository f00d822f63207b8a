"""The device that torch finds where tensors of the CPU stand for those of a card that is not here.

Torch asks for the type of a device to decide how it writes an op as other ops, and which patterns of ops it replaces. A plan
that is made without the card fits the graph on the card only if both have the same ops. Decompositions and patterns therefore
find the card. The ops that they call find the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autoremat.torch_private.hooks import Method, hooked, substituted

CARD = torch.device("cuda", 0)
CPU = torch.device("cpu")

_finds_card: ContextVar[bool] = ContextVar("autoremat_finds_card", default=False)
"""True where this thread finds the tensors of the CPU on the card."""


@contextlib.contextmanager
def decided_as_on_card() -> Iterator[None]:
    """Makes decompositions and Inductor's patterns act as on the card, while active."""
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.pattern_matcher import PatternMatcherPass
    from torch.fx.experimental import proxy_tensor

    def decompose_on_card(decompose: Method, *arguments: Any) -> Any:
        with _finding_card():
            return decompose(*arguments)

    def found_device(device: Method, tensor: FakeTensor) -> torch.device:
        found: torch.device = device(tensor)
        return CARD if _finds_card.get() and found.type == CPU.type else found

    with (
        hooked(FakeTensor, "device", found_device),
        substituted(FakeTensor, "is_cuda", lambda tensor: tensor.device.type == CARD.type),
        hooked(proxy_tensor, "maybe_handle_decomp", decompose_on_card),
        substituted(joint_graph, "get_gpu_type", lambda: CARD.type),
        hooked(FakeTensorMode, "from_tensor", _convert_on_cpu),
        hooked(PatternMatcherPass, "apply", _replace_on_card),
    ):
        yield


@contextlib.contextmanager
def _finding_card() -> Iterator[None]:
    """Makes this thread find the tensors of the CPU on the card, except within ops."""
    with _finding(True), _OpsOnCpu():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def _finding(card: bool) -> Iterator[None]:
    token = _finds_card.set(card)
    try:
        yield
    finally:
        _finds_card.reset(token)


class _OpsOnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with _finding(False):
            args, kwargs = tree_map(_on_cpu, (args, kwargs or {}))
            return op(*args, **kwargs)


def _convert_on_cpu(from_tensor: Method, *arguments: Any, **keywords: Any) -> Any:
    with _finding(False):
        return from_tensor(*arguments, **keywords)


def _replace_on_card(apply: Method, patterns: Any, graph: fx.GraphModule | fx.Graph) -> int:
    """Returns the number of replacements by ``patterns`` in ``graph``, whose nodes name the card meanwhile."""
    nodes = (graph.graph if isinstance(graph, fx.GraphModule) else graph).nodes
    if any(isinstance(node.meta.get("val"), FakeTensor) and node.meta["val"].device.type == CARD.type for node in nodes):
        return int(apply(patterns, graph))  # it was moved to the card
    _name_devices(nodes, on_card)
    try:
        with _finding_card():
            return int(apply(patterns, graph))
    finally:
        _name_devices(nodes, _on_cpu)


def _name_devices(nodes: Any, named: Callable[[Any], Any]) -> None:
    for node in nodes:
        node.args = fx.node.map_aggregate(node.args, named)
        node.kwargs = fx.node.map_aggregate(node.kwargs, named)


def on_card(argument: Any) -> Any:
    """Returns the card for a device that is the CPU; anything else as it is."""
    return CARD if isinstance(argument, torch.device) and argument.type == CPU.type else argument


def _on_cpu(argument: Any) -> Any:
    return CPU if isinstance(argument, torch.device) and argument.type == CARD.type else argument
