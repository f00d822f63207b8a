"""Adds each late summand onto the early one, so that the operands of an early product become free sooner.

A weight that is used twice, such as an embedding tied to the output projection, has a gradient that is a sum. Inductor fuses
the addition and its matrix product into one ``addmm``, which runs once the later summand exists. The product's operands are
live until then: for the projection, the gradient of the logits stays live through the whole backward.

The pass rewrites additions whose product has no other reader. The form depends on the later summand:

    a product       add(early, mm(a, b))         becomes   addmm(early, a, b)
    a scatter       add(mm(a, b), put(0, x))     becomes   put(mm(a, b), x)
    anything else   add(mm(a, b), late)          becomes   sub(late, neg(mm(a, b)))

The first two forms save one result. The last one has the same bits as the addition, but Inductor does not fuse it into an
``addmm``. The pass is only for graphs that Inductor compiles, because the rewritten sums may round differently. It applies to
all supported versions of torch.
"""

import operator
from collections.abc import Mapping

import torch
from torch import fx

from autoremat.ops.op_traits import is_view
from autoremat.passes.rows.row_partition import size_hints
from autoremat.torch_private import higher_order

aten = torch.ops.aten

ZEROS = (aten.full.default, aten.zeros.default, aten.new_zeros.default)

SCATTERS = (
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten._unsafe_masked_index_put_accumulate.default,
)
"""Ops that add values to places of their first argument. The ``index_put`` ops do so only if ``accumulate`` is set."""


def accumulate_into_first(joint: fx.GraphModule) -> int:
    """Rewrites additions in ``joint`` in place, a joint graph for Inductor, and returns the number of rewritten additions."""
    position = {node: index for index, node in enumerate(joint.graph.nodes)}
    rewritten = 0
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and node.target is aten.add.Tensor and not node.kwargs:
            sum_ = _rewritten(joint.graph, node, position)
            if sum_ is not None:
                position[sum_] = position[node]  # the sum may be a summand of the next addition
                rewritten += 1
    if rewritten:
        joint.graph.eliminate_dead_code()
    return rewritten


def _rewritten(graph: fx.Graph, add: fx.Node, position: Mapping[fx.Node, int]) -> fx.Node | None:
    if len(add.args) != 2 or not all(isinstance(n, fx.Node) and n in position for n in add.args):
        return None
    early, late = sorted((n for n in add.args if isinstance(n, fx.Node)), key=lambda n: position[n])
    if early is late or not (_same_type(early, add) and _same_type(late, add)):
        return None
    if _is_only_for(add, late, aten.mm.default) and size_hints(early) == size_hints(add):  # comparing symbols adds guards
        return _replaced(graph, add, aten.addmm.default, (early, *late.args))
    if not _is_only_for(add, early, aten.mm.default) or not _launches_between(early, late):
        return None
    if _accumulates_on_zeros(late) and len(late.users) == 1 and not late.kwargs and size_hints(late) == size_hints(early):
        assert isinstance(late.target, torch._ops.OpOverload)
        return _replaced(graph, add, late.target, (early, *late.args[1:]))
    with graph.inserting_before(add):
        negated = graph.call_function(aten.neg.default, (early,))
    negated.meta = dict(add.meta) | {"val": early.meta["val"]}
    return _replaced(graph, add, aten.sub.Tensor, (late, negated))


def _replaced(graph: fx.Graph, add: fx.Node, target: torch._ops.OpOverload, arguments: tuple[fx.node.Argument, ...]) -> fx.Node:
    with graph.inserting_before(add):
        sum_ = graph.call_function(target, arguments)
    sum_.meta = dict(add.meta)
    add.replace_all_uses_with(sum_)
    return sum_


def _is_only_for(reader: fx.Node, node: fx.Node, target: torch._ops.OpOverload) -> bool:
    return node.target is target and len(node.users) == 1 and reader in node.users


def _launches_between(early: fx.Node, late: fx.Node) -> bool:
    """Returns True if a call other than a view or tuple unpacking stands between the two nodes."""
    node = early.next
    while node is not late and node.op != "root":
        if node.op == "call_function" and node.target is not operator.getitem and not is_view(node):
            return True
        node = node.next
    return False


def _accumulates_on_zeros(node: fx.Node) -> bool:
    if node.target not in SCATTERS:
        return False
    base = node.args[0]
    if not isinstance(base, fx.Node) or base.target not in ZEROS or (base.target is aten.full.default and base.args[1] != 0):
        return False
    return node.target is aten._unsafe_masked_index_put_accumulate.default or node.args[3:4] == (True,)


def _same_type(node: fx.Node, other: fx.Node) -> bool:
    first, second = node.meta.get("val"), other.meta.get("val")
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return (first.dtype, first.device) == (second.dtype, second.device)


# -- reads that would keep tensors for the backward, or keep ops from running again, although the result needs neither -------


def forward_region_operands(joint: fx.GraphModule) -> int:
    """Reads operands of a nested compile region directly where the region returns them unchanged. Returns their number.

    The forward of such a region returns all tensors that its backward needs, operands included. If an operand is read through
    the region's results, the backward cannot omit the region.

         r = region(x, w) ── r[2], which is w ── backward            becomes            w ── backward
    """
    replaced = 0
    for node in list(joint.graph.nodes):
        operands = higher_order.returned_operands(node) if node.op == "call_function" else {}
        for user in list(node.users) if operands else []:
            operand = operands.get(user.args[1]) if user.target is operator.getitem else None
            if operand is not None:
                user.replace_all_uses_with(operand)
                joint.graph.erase_node(user)
                replaced += 1
    return replaced


AVERAGES = slice(3, 5)
"""Positions of the running averages among the arguments."""
IS_TRAINING = 7
"""Position of the argument that is True in training."""


def ignore_running_averages(module: fx.GraphModule) -> int:
    """Drops the running averages from gradients of batch norms in training, which do not depend on them.

    A backward that names them would keep the new averages of every batch norm for it. What names them cannot run again either,
    because the step overwrites them. Returns the number of rewritten calls.
    """
    rewrites = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[IS_TRAINING] is True and node.args[AVERAGES] != (None, None):
            node.args = (*node.args[: AVERAGES.start], None, None, *node.args[AVERAGES.stop :])
            rewrites += 1
    return rewrites
