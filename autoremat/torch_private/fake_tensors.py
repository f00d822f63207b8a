"""Torch's private names for fake tensors, and for tracing a step without compiling or running it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from autoremat.basics.errors import causes
from autoremat.torch_private import compilers, joint_graphs
from autoremat.torch_private.hooks import assigned

MANY = 1 << 20

RUNS_NOTHING = {"shape_padding": False, "max_autotune": False, "max_autotune_gemm": False, "max_autotune_pointwise": False}
"""Inductor settings under which no decision depends on running a kernel."""

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors raised when code asks for the value of a fake tensor."""

FAILED_OP = torch._dynamo.exc.TorchRuntimeError
"""The error raised when an op rejects its arguments. The op's own error is the first of its causes."""

Partition = Callable[..., joint_graphs.PartitionedModules]


def is_fake(value: object) -> bool:
    """Returns True for a fake tensor, which has no memory."""
    return isinstance(value, FakeTensor)


def new_mode() -> FakeTensorMode:
    """Returns a mode in which tensors have sizes, types and devices, and no memory. It turns real tensors into fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a fake tensor, or parameter, with the sizes, strides and type of ``tensor``, on ``device``.

    Raises ``NotImplementedError`` for a tensor subclass on another device.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        if tensor.device != device:
            raise NotImplementedError(f"a {type(tensor).__name__} cannot be moved to another device without its data")
        return mode.from_tensor(tensor, static_shapes=True)
    with mode, torch.no_grad():
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        made = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def compiled_by(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` with its graphs handed to ``backend``.

    All sizes are constants, whatever was compiled before. Dynamo raises errors, and no recompile limit applies.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        settings = {
            "recompile_limit": MANY, "accumulated_recompile_limit": MANY, "automatic_dynamic_shapes": False,
            "suppress_errors": False,
        }  # fmt: skip
        log = logging.getLogger("torch._subclasses.fake_tensor")  # of an op that rejects its arguments, which raises too
        with torch._dynamo.config.patch(settings), warnings.catch_warnings(), assigned(log, "disabled", True):
            # Dynamo reads the gradients of a graph's inputs. After a graph break, these are not leaves.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
            return torch.compile(function, backend=backend, dynamic=False)(*args, **kwargs)

    return run


class _NoBackward(Exception):
    """Raised if AOTAutograd asks for code before it asks for a partition: the graph has no backward."""


def _no_code(*_: Any, **__: Any) -> Any:
    raise _NoBackward


def own_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs that Dynamo hands to a backend, with tensors converted to the fake mode of Dynamo's tracing."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    assert mode is not None, "called by Dynamo"
    return [mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x for x in inputs]


def trace_joint(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Partition,
    inductor: bool,
    config: Mapping[str, Any],
) -> None:
    """Traces the joint graph of ``module`` with AOTAutograd and hands it to ``partition``, which ends the tracing by raising.

    ``inductor`` selects Inductor's decompositions and its passes over joint graphs, under ``config``.
    Returns normally if there is no backward.
    """
    try:
        if not inductor:
            compilers.compile_uncompiled(module, inputs, partition)
            return
        compilers.trace_as_inductor_does(module, inputs, {**config, "custom_partitioner_fn": partition}, _no_code)
    except Exception as error:
        if not any(isinstance(cause, _NoBackward) for cause in causes(error)):
            raise


def partition_for(
    share: float, joint: fx.GraphModule, inputs: Sequence[object], keywords: Mapping[str, Any]
) -> joint_graphs.PartitionedModules:
    """Returns torch's own partition of a copy of ``joint`` at ``activation_memory_budget=share``.

    Budgets in the model are ignored.
    """
    copied = copied_module(joint)
    for node in copied.graph.nodes:
        if joint_graphs.torchs_budget(node) is not None:
            node.meta["custom"] = {k: v for k, v in node.meta["custom"].items() if k != joint_graphs.BUDGET_KEY}
    with functorch_config.patch(activation_memory_budget=share):
        return joint_graphs.partition_as_torch_does(copied, inputs, **keywords)


def copied_module(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a module with a :func:`shallow_copy` of the graph, and with the same attributes and metadata."""
    copied = fx.GraphModule(module, shallow_copy(module.graph))
    copied.meta = dict(module.meta)
    return copied


def shallow_copy(graph: fx.Graph) -> fx.Graph:
    """Returns a copy of the graph whose nodes have the same names and metadata."""
    copied = fx.Graph()
    result = copied.graph_copy(graph, {})
    copied.output(result)
    for before, after in zip(graph.find_nodes(op="output"), copied.find_nodes(op="output"), strict=True):
        after.meta = dict(before.meta)
    return copied
