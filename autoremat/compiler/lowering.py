"""The stage that lowers: Inductor generates code for a graph, and a decision on its peak may end the compilation early."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from autoremat.basics.errors import find_cause
from autoremat.compiler.attempts import Verdict
from autoremat.compiler.joint_graph import Partitioner
from autoremat.compiler.partitioning import Partitioning
from autoremat.compiler.planned_graph import PlannedGraph
from autoremat.compiler.problem import Problem
from autoremat.host_memory import ops
from autoremat.planner.cost.datasheets import UNKNOWN_GPU, datasheet
from autoremat.torch_private import compilers, dynamo, inductor_lowering, layouts, named_card
from autoremat.torch_private.inductor_lowering import LoweredPeak

Compiled = Callable[..., Any]
Halves = Mapping[bool, LoweredPeak]
"""The generated code of the forward (False) and of the backward (True)."""


def code_peaks(halves: Halves) -> dict[bool, int]:
    """Returns the peaks of ``halves``. CUDA graphs record both into one pool, which keeps the most bytes of either of them."""
    pool = max((half.pool_bytes or 0 for half in halves.values()), default=0)
    return {is_backward: half.peak_bytes + pool - (half.pool_bytes or 0) for is_backward, half in halves.items()}


class _Rejected(Exception):
    """Ends a compilation after code generation and before kernels are compiled."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


def lower(
    problem: Problem,
    partitioning: Partitioning[PlannedGraph],
    identity: tuple[object, ...],
    decide: Callable[[Halves], Verdict | None],
) -> tuple[Compiled | None, Halves, Verdict | None]:
    """Returns the compiled callable and the halves with generated code; or None, the halves and the verdict that rejects them.

    Inductor compiles the graph, with ``partitioning`` under the name ``identity`` in torch's caches. After the code of each
    half, ``decide`` receives the halves so far. None lets Inductor continue.
    """
    halves: dict[bool, LoweredPeak] = {}

    def observe(half: LoweredPeak) -> None:
        halves[half.is_backward] = half
        verdict = decide(halves)
        if verdict is not None:
            raise _Rejected(verdict)

    assert problem.module is not None
    module = dynamo.copied_with_sources(problem.module)  # Inductor takes ownership, so another attempt needs a fresh one
    partitioner = Partitioner(partitioning, identity)
    patches = {**problem.patches, "custom_partitioner_fn": partitioner}
    answers: AbstractContextManager[None] = contextlib.nullcontext()
    if problem.cuda_name is not None and not torch.cuda.is_available():  # code for a card that is not here
        answers = named_card.generating_for(datasheet(problem.cuda_name) or UNKNOWN_GPU, problem.cuda_name)
    try:
        with (
            inductor_lowering.memory_first(lambda: partitioning.facts.memory_first, lambda: partitioning.facts.pins_forward),
            inductor_lowering.draws_by_place(patches),
            inductor_lowering.draws_in_sequence(),
            inductor_lowering.sums_at_their_places(),
            layouts.laid_out_as_saved((ops.copy_to_host, ops.wait_for_copy_to_host)),
            layouts.inputs_as_they_are(),
            layouts.results_as_traced(),
            layouts.attention_as_traced(),
            inductor_lowering.observe_lowering(lambda: partitioning.facts.replay_context, observe),
            answers,
        ):
            return compilers.compile_with_inductor(module, problem.inputs, patches, eager_backward=True), halves, None
    except Exception as error:
        rejected = find_cause(error, _Rejected)
        if rejected is None:
            raise
        return None, halves, rejected.verdict
    finally:
        partitioner.release()
