"""What generated code allocates: the facts that its replay cannot read from the code, and the bytes of whole CUDA blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from autoremat.capture.capture import Capture
from autoremat.ops.collectives import GLOO_THREADS, held_bytes
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import SHARDS, Form, Role, Value
from autoremat.planner.memory.allocations import HalfAllocations, joined, unsplit_bytes
from autoremat.planner.memory.wrapper_replay import ReplayContext
from autoremat.torch_private import compilers
from autoremat.torch_private.allocator import settings_of_process
from autoremat.workspaces.formulas import SMALL

WITHOUT_RULE = ("roundup_power2_divisions", "max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb")
"""Settings of the allocator that change blocks and that no rule here follows."""


def code_headroom_bytes(graph: Graph) -> int:
    """Returns the code headroom in bytes: memory that generated code may allocate at any time beside its buffers."""
    return SMALL + (SMALL if any(op.target.startswith("aten.convolution") and op.workspace_bytes for op in graph.ops) else 0)


def _fixed_strides(tensor: object) -> tuple[int, ...] | None:
    """Returns the strides of the dimensions longer than 1 of an image or a convolution weight (four dimensions).

    Returns None for other tensors and for symbolic sizes.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.dim() != 4:
        return None
    pairs = list(zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(step for size, step in pairs if size != 1) if all(type(n) is int for pair in pairs for n in pair) else None


def _copied_inputs(captured: Capture, kept_inputs: Collection[int]) -> dict[str, int] | None:
    """Returns the bytes by name of the inputs that CUDA graphs copy; None without CUDA graphs."""
    if captured.runs_on != "cuda" or not compilers.records_cuda_graphs():
        return None
    found = {number: captured.value_nodes[number] for number in kept_inputs}
    return {node.name: captured.graph.values[number].bytes for number, node in found.items() if node is not None}


def copies_for_cuda_graphs_bytes(captured: Capture, kept_inputs: Collection[int]) -> int:
    """Returns the bytes of all inputs and tangents that CUDA graphs copy into their memory; 0 without CUDA graphs."""
    copied = _copied_inputs(captured, kept_inputs)
    if copied is None:
        return 0
    return sum(copied.values()) + sum(value.bytes for value in captured.graph.values if value.role is Role.TANGENT)


def held_too_long_bytes(captured: Capture) -> int:
    """Returns the most bytes that finished collectives may still hold at any time."""
    held = [held_bytes(node, captured.runs_on) for node in captured.op_nodes]
    for value, form in _shards(captured.graph):
        if form.load.temporary_bytes:
            held.append(form.device_bytes + value.bytes + form.load.temporary_bytes)
    return GLOO_THREADS * max(held, default=0)


def _shards(graph: Graph) -> Iterator[tuple[Value, Form]]:
    return ((value, form) for value in graph.values for form in value.forms if form.name == SHARDS)


def replay_context(captured: Capture, kept_inputs: Collection[int]) -> ReplayContext:
    """Returns the context for the replay.

    ``kept_inputs`` are the numbers of the values that are inputs, but neither parameters nor buffers.
    """
    graph = captured.graph
    held = {}
    for number in graph.forward_outputs:
        holder = captured.value_nodes[number]
        held[holder.name if holder is not None else graph.values[number].name] = graph.values[number].bytes
    workspaces: dict[str, dict[int, int]] = {}
    for target, sizes in graph.workspaces().items():
        parts = target.split(".")  # as in "aten.mm.default"; names of higher-order ops and of custom kernels differ
        if len(parts) == 3:
            known = workspaces.setdefault(parts[1], {})
            known.update({made: max(size, known.get(made, 0)) for made, size in sizes.items()})
    for value, form in _shards(graph):
        workspaces.setdefault("all_gather_into_tensor", {})[value.bytes] = form.load.temporary_bytes
    inputs = captured.joint.graph.find_nodes(op="placeholder")
    return ReplayContext(
        held,
        captured.device.allocation_bytes,
        workspaces,
        code_headroom_bytes(graph) + held_too_long_bytes(captured),
        {n.name: strides for n in inputs if (strides := _fixed_strides(n.meta.get("val"))) is not None},
        _copied_inputs(captured, kept_inputs),
        captured.runs_on,
    )


def code_unsplit_bytes(halves: Mapping[bool, HalfAllocations], beside: Sequence[int]) -> int:
    """Returns the bytes of blocks beside the tensors in them at the peak of generated code, of which one half may be missing.

    Further allocations of the bytes ``beside`` are live. With both halves, it is the peak of the backward.
    """
    step = joined(halves[False], halves[True]) if len(halves) == 2 else next(iter(halves.values()))
    is_expandable = "expandable_segments:True" in settings_of_process().replace(" ", "")
    return unsplit_bytes(step.beside(beside), is_expandable)


def note_on_settings(device_type: str) -> str:
    """Returns a note on the settings of the allocator that no rule here follows; empty if there are none."""
    text = settings_of_process() if device_type == "cuda" else ""
    ignored = [name for name in WITHOUT_RULE if name in text]
    return f"blocks of memory are counted without {', '.join(ignored)}" if ignored else ""
