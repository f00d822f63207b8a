"""The surroundings of a graph: the facts about its place in the job that decide what is asked of it.

Each way to distribute or to divide a step has one property here for its facts. Two are read from the graph where it is
compiled: ``split_graphs.current_split`` for buckets and parts, ``dynamo.sharded_inputs`` for parameters under ``fully_shard``.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autoremat.capture.source_info import graph_key
from autoremat.device_memory.inventory import rows_to_come
from autoremat.planner.multigraph.device_budget import LedgerRow
from autoremat.torch_private import dynamo, frames

FREE_STEP = 64 * 2**20
"""Bytes to a multiple of which the free bytes of a device are rounded down."""

BLOCK: ContextVar[int | None] = ContextVar("autoremat_block", default=None)
"""The number of the block whose forward runs in this thread; None outside of the blocks of ``compile_blocks``."""

Receiver = Callable[[fx.GraphModule, Sequence[Any], Mapping[str, Any]], Callable[..., Any]]
"""Returns a callable for a graph with inputs, under settings of Inductor, in place of the compiler."""

RECEIVER: ContextVar[Receiver | None] = ContextVar("autoremat_receiver", default=None)
"""What receives the graphs of this thread, and of its backwards, in place of the compiler; None without a step profile."""


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The facts about the place of a graph, or of a step of several graphs, in the job. Each is found when it is asked for."""

    device: torch.device
    module: fx.GraphModule | None = None
    """The graph as Dynamo captured it; None for a step of several graphs."""
    inputs: Sequence[Any] = ()
    passed_bytes: int | None = None
    """Bytes of the tensors that a step is passed; None for those that ``inputs`` show."""
    free_bytes_of: Callable[[torch.device], int | None] = field(default_factory=lambda: free_device_bytes)
    """Returns the bytes that the step could allocate on a device; None if they are unknown."""
    is_card: bool = False
    """True if the device stands for a card of CUDA by name."""
    runs_here: bool = True
    """False if another process or machine runs the graph: it has no block, live optimizers or earlier graphs here."""

    @cached_property
    def key(self) -> str:
        """Hash of the graph, by which a step profile knows it."""
        return "" if self.module is None else graph_key(self.module, self.inputs)

    @cached_property
    def given_bytes(self) -> int:
        """Bytes that a call is passed beside parameters and buffers."""
        if self.passed_bytes is not None or self.module is None:
            return self.passed_bytes or 0
        return dynamo.passed_bytes(self.module, self.inputs, self.device, self.is_card or self.device.type == "cuda")

    @cached_property
    def optimizer_rows(self) -> tuple[LedgerRow, ...]:
        """Memory that live optimizers of this process will allocate on the device."""
        return rows_to_come(self.device) if self.runs_here else ()

    @cached_property
    def block(self) -> int | None:
        """The number of the block whose forward runs; None outside of the blocks of ``compile_blocks``."""
        return BLOCK.get() if self.runs_here else None

    @cached_property
    def why_broken(self) -> str | None:
        """The reason why Dynamo broke the function, "" if it is unknown; None if the graph is the whole function."""
        if self.module is None:
            return None
        reason = dynamo.graph_break_around(self.module)
        if reason is None and not dynamo.is_called_by_a_broken_function():
            return None
        return reason or frames.reasons.behind()

    @cached_property
    def function(self) -> int | None:
        """Dynamo's number of the function, which its recompilations share; None if it is not compiled here."""
        return dynamo.number_of_function() if self.runs_here else None

    @cached_property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters that are inputs of the graph."""
        return tuple(tensor for tensor in self.inputs if isinstance(tensor, torch.nn.Parameter))

    @cached_property
    def evaluates(self) -> bool:
        """True if modules own parameters of the graph, and all of these modules are in evaluation mode."""
        parameters = {id(parameter) for parameter in self.parameters}
        # By their own types: proxies and lazy objects are not asked.
        modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_parameters" in vars(one)]
        owners = [one for one in modules if not parameters.isdisjoint(map(id, one._parameters.values()))]
        owners = [one for one in owners if not isinstance(one, fx.GraphModule)]
        return bool(owners) and not any(one.training for one in owners)


def free_device_bytes(device: torch.device) -> int | None:
    """Returns the bytes that the step could allocate on ``device`` now; None on the CPU.

    The number counts free memory and the unused memory that torch's allocator holds.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    usable = int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    # Round down, so that a second compilation finds the same budget, and so the same plan, in the caches.
    return usable // FREE_STEP * FREE_STEP
