"""The stage that lowers: Inductor generates code for a graph, and a decision on its peak may end the compilation early."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import find_cause
from autoremat.compiler.attempts import Verdict
from autoremat.compiler.partitioner import Partitioner
from autoremat.compiler.partitioning import Partitioning
from autoremat.host_memory import ops
from autoremat.planner.cost.datasheets import UNKNOWN_GPU, datasheet
from autoremat.planner.memory.allocations import HalfAllocations
from autoremat.torch_private import compilers, dynamo, inductor_lowering, layouts, named_card

Compiled = Callable[..., Any]

EAGER_BACKWARD = {"force_non_lazy_backward_lowering": True}
"""Inductor settings that compile the backward together with the forward instead of at its first call. The peak of both halves
is then known while the plan can still change."""


@dataclass(frozen=True)
class GraphSource:
    """A graph that Dynamo captured, with its inputs and the Inductor options that the user set."""

    module: fx.GraphModule
    inputs: Sequence[Any]
    patches: Mapping[str, Any]
    cuda_name: str | None = None
    """Name of the CUDA device that is planned for by its data sheet; None to plan for the device of the graph."""

    may_repeat_collectives: bool = False
    """True if all ranks are taken to follow one plan, because none of them runs this one."""

    @property
    def is_represented(self) -> bool:
        """True if the device is not here, and tensors of the CPU stand for its tensors."""
        return self.cuda_name is not None and not torch.cuda.is_available()


@dataclass(frozen=True)
class Lowered:
    """The generated code of one attempt."""

    code_peaks: Mapping[bool, int]
    """Peaks in bytes of the forward (False) and the backward (True), for the halves with generated code."""
    is_estimate: bool = False
    """True if a peak is an estimate, because the code could not be replayed."""
    pool_bytes: int | None = None
    """Bytes that the pool of CUDA graphs keeps after both halves were recorded. None without CUDA graphs."""
    allocations: Mapping[bool, HalfAllocations] = field(default_factory=dict)
    """The allocations of the halves whose code could be replayed."""

    @classmethod
    def of(cls, halves: Mapping[bool, inductor_lowering.LoweredPeak]) -> Lowered:
        """Returns the peaks of ``halves``, named by ``is_backward``.

        Both halves are recorded into one pool, which keeps the most bytes that either of them needs.
        """
        pools = [half.pool_bytes for half in halves.values() if half.pool_bytes is not None]
        pool = max(pools, default=None)
        peaks = {name: half.peak_bytes - (half.pool_bytes or 0) + (pool or 0) for name, half in halves.items()}
        allocations = {name: half.allocations for name, half in halves.items() if half.allocations is not None}
        return cls(peaks, any(half.is_estimate for half in halves.values()), pool, allocations)


class _Rejected(Exception):
    """Ends a compilation after code generation and before kernels are compiled."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


def _answers_for(source: GraphSource) -> AbstractContextManager[None]:
    """Returns the context in which Inductor generates code for a card that is not here; an empty one for other devices."""
    if source.cuda_name is None or not source.is_represented:
        return contextlib.nullcontext()
    return named_card.generating_for(datasheet(source.cuda_name) or UNKNOWN_GPU, source.cuda_name)


def lower(
    source: GraphSource,
    partitioning: Partitioning[Any],
    identity: tuple[object, ...],
    decide: Callable[[Lowered], Verdict | None],
) -> tuple[Compiled | None, Lowered, Verdict | None]:
    """Returns the compiled callable and the code's peaks; or None, the peaks and the verdict that rejects the code.

    Inductor compiles the source, with ``partitioning`` under the name ``identity`` in torch's caches. After the code of each
    half, ``decide`` receives the peaks so far. None lets Inductor continue.
    """
    halves: dict[bool, inductor_lowering.LoweredPeak] = {}

    def observe(half: inductor_lowering.LoweredPeak) -> None:
        halves[half.is_backward] = half
        verdict = decide(Lowered.of(halves))
        if verdict is not None:
            raise _Rejected(verdict)

    module = dynamo.copied_with_sources(source.module)  # Inductor takes ownership, so another attempt needs a fresh one
    partitioner = Partitioner(partitioning, identity)
    patches = {**source.patches, "custom_partitioner_fn": partitioner}
    try:
        with (
            inductor_lowering.memory_first(lambda: partitioning.memory_first, lambda: partitioning.pins_forward),
            inductor_lowering.draws_by_place(patches),
            inductor_lowering.draws_in_sequence(),
            inductor_lowering.sums_at_their_places(),
            layouts.laid_out_as_saved((ops.copy_to_host, ops.wait_for_copy_to_host)),
            layouts.inputs_as_they_are(),
            layouts.results_as_traced(),
            layouts.attention_as_traced(),
            inductor_lowering.observe_lowering(lambda: partitioning.replay_context, observe),
            _answers_for(source),
        ):
            compiled = compilers.compile_with_inductor(module, source.inputs, patches, EAGER_BACKWARD)
    except Exception as error:
        rejected = find_cause(error, _Rejected)
        if rejected is None:
            raise
        return None, Lowered.of(halves), rejected.verdict
    finally:
        partitioner.release()
    return compiled, Lowered.of(halves), None
