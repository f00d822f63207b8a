"""Keeps one copy of a value that is compared with a number chosen from it, such as a row with its maximum.

The gradient of ``amax`` goes to the elements that equal the maximum. Inductor computes a value anew for each kernel that
reads it. The last bits of vectorised and of scalar code differ, as do numbers in registers from those rounded to 16 bits. An
element then no longer equals the maximum: the gradient is 0 / 0, or goes elsewhere.

    x ─┬─ amax ── r          Before: ``x`` runs in the forward's kernel, and again in the backward's.
       └──────── eq(x, r)    After: ``x`` runs once, is written to memory, and every kernel reads it there.

The same holds for masks that a model makes so, such as ``x >= x.topk(k).values[..., -1:]``.
"""

import math
from collections.abc import Iterator

import torch
from torch import fx

from autoremat.ops.op_traits import COMPARED, MATERIALIZED, is_pointwise, is_view, kind_of, packet
from autoremat.planner.graph.op import Kind
from autoremat.torch_private.symbolic_sizes import size_hint
from autoremat.torch_private.tensors import tensors_in

aten, prims = torch.ops.aten, torch.ops.prims

COMPARISONS = frozenset({aten.eq, aten.ne, aten.ge, aten.gt, aten.le, aten.lt})
DIFFERENCES = frozenset({aten.sub, aten.div})
"""Ops whose result shows exactly whether two numbers are equal: by 0, or by 1."""

STEPS = frozenset({aten.ceil, aten.floor, aten.round, aten.sign, aten.trunc})
SCALINGS = DIFFERENCES | {aten.mul}
"""Ops that bring numbers onto a grid of steps. The largest number may lie on the last step."""

CONSTANTS = frozenset(
    {
        aten.arange, aten.full, aten.full_like, aten.new_full, aten.new_ones, aten.new_zeros, aten.ones, aten.ones_like,
        aten.scalar_tensor, aten.zeros, aten.zeros_like, prims.iota,
    }
)  # fmt: skip

COPIES = frozenset(
    {
        aten._unsafe_index, aten._unsafe_view, aten.abs, aten.cat, aten.clone, aten.constant_pad_nd, aten.flip, aten.gather,
        aten.index, aten.index_select, aten.masked_fill, aten.neg, aten.relu, aten.repeat, aten.roll, aten.slice_scatter,
        aten.stack, aten.where, prims.rev,
    }
)  # fmt: skip
"""Ops whose results are numbers of their operands, with another sign at most. Any code computes them exactly."""

SELECTIONS = frozenset(
    {
        aten.adaptive_max_pool2d, aten.amax, aten.amin, aten.aminmax, aten.clamp, aten.clamp_max,
        aten.clamp_min, aten.cummax, aten.cummin, aten.fmax, aten.fmin, aten.index_reduce, aten.kthvalue, aten.max,
        aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.maximum, aten.median, aten.min, aten.minimum,
        aten.mode, aten.nanmedian, aten.scatter_reduce, aten.sort, aten.topk, prims._low_memory_max_pool_with_offsets,
        prims.amax, prims.amin,
    }
)  # fmt: skip
"""Ops whose results are chosen among the numbers of their operands."""

NORMS = frozenset({aten.linalg_vector_norm, aten.norm})
"""Selections if their order is infinite."""


def keep_compared(joint: fx.GraphModule) -> int:
    """Marks values that are compared with numbers chosen from them: they run once and are written. Returns their number."""
    kept = {value for node in joint.graph.nodes for value in _compared(node)}
    for node in kept:
        node.meta[COMPARED] = True
        if kind_of(node) is Kind.POINTWISE:  # Inductor writes the results of all others in any case
            node.meta[MATERIALIZED] = True
    return len(kept)


def _compared(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the values from which both operands of a comparison come, if numbers were chosen on the way."""
    if packet(node) not in COMPARISONS | STEPS:
        return
    operands = _floating(node)
    if len(operands) == 1 and packet(operands[0]) in (SCALINGS if packet(node) in STEPS else DIFFERENCES):
        operands = _floating(operands[0])
    if len(operands) != 2:
        return
    most = max(map(_numbers, operands))
    first, second = (_origins(operand, most) for operand in operands)
    yield from (value for value in first if value in second and (first[value] or second[value]))


def _origins(operand: fx.Node, most: int) -> dict[fx.Node, bool]:
    """Returns the computed values whose numbers the operand holds, each with True if some were chosen on the way.

    An operand of fewer numbers than ``most`` is a threshold. It may come from chosen numbers by arithmetic too.
    """
    found: dict[fx.Node, bool] = {}
    stack, seen = [(operand, False)], set()
    while stack:
        node, chosen = stack.pop()
        if (node, chosen) in seen or node.op != "call_function" or packet(node) in CONSTANTS:
            continue
        seen.add((node, chosen))
        is_norm = packet(node) in NORMS and any(isinstance(a, (int, float)) and math.isinf(a) for a in node.args)
        selects = is_norm or packet(node) in SELECTIONS
        is_threshold = _numbers(node) < most and is_pointwise(node)
        if selects or _copies(node) or is_threshold:
            stack += [(read, chosen or selects) for read in _floating(node)]
        else:
            found[node] = found.get(node, False) or chosen
    return found


def _copies(node: fx.Node) -> bool:
    """Returns True if the node's results are numbers of its operands. A cast to fewer bits makes other numbers."""
    if is_view(node) or packet(node) in COPIES or getattr(node.target, "__name__", "") == "getitem":
        return True
    if packet(node) not in (aten._to_copy, prims.convert_element_type):
        return False
    (read,) = node.all_input_nodes[:1]
    return bool(node.meta["val"].dtype.itemsize >= read.meta["val"].dtype.itemsize)


def _floating(node: fx.Node) -> list[fx.Node]:
    return [read for read in node.all_input_nodes if any(t.is_floating_point() for t in tensors_in(read.meta.get("val")))]


def _numbers(node: fx.Node) -> int:
    return max((math.prod(map(size_hint, tensor.shape)) for tensor in tensors_in(node.meta.get("val"))), default=0)
