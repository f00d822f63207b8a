"""Moves gradients that nothing reads, such as those of weights, behind the fusible ops that follow them.

Autograd traces a weight's gradient before the gradient of the activation function in front of the layer. Both read the
activation's operand, if the activation runs again. The extern kernel between them would keep them in two kernels:

         dx = mm(dy, w) ── x = gelu(h) ── dw = mm(dy, x) ── dh = gelu_backward(dx, h) ── mm(dh, v)
    becomes
         dx = mm(dy, w) ── x = gelu(h) ── dh = gelu_backward(dx, h) ── dw = mm(dy, x) ── mm(dh, v)

Here ``x`` and ``dh`` are one kernel, which reads ``h`` once. The peak is seldom higher, because ``h`` and ``dx`` are free when
``dw`` runs. If no plan fits, the planner moves gradients to the front (:mod:`autoremat.planner.search.gradients_first`).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autoremat.ops.op_traits import is_view, kind_of, traits_of
from autoremat.planner.graph.op import PASSED_BY_NONE, Kind
from autoremat.torch_private import joint_graphs


def postpone_gradients(joint: fx.GraphModule, runs_on: str) -> int:
    """Moves such gradients in ``joint``, in place, and returns their number. ``runs_on`` is the type of the planned device.

    No gradient passes another extern kernel that the backward reads, or an op with one of the traits ``PASSED_BY_NONE``.
    """
    in_backward, waiting, moved, passing = _from_tangents(joint), dict[fx.Node, None](), 0, 0
    for node in list(joint.graph.nodes):
        if node in waiting or (node.op == "call_function" and _costs_nothing(node)):
            continue
        if node.op == "call_function" and not _ends_group(node, runs_on):
            passing = len(waiting)
        elif node in in_backward and (gradient := _with_views(node)):
            waiting |= dict.fromkeys(gradient)
        elif node.op in ("call_function", "output"):
            for place, one in enumerate(waiting if passing else ()):
                node.prepend(one)
                moved += place < passing and not _costs_nothing(one)
            waiting, passing = {}, 0
    return moved


def _from_tangents(joint: fx.GraphModule) -> set[fx.Node]:
    """Returns the calls that depend on a tangent."""
    found = {node for node in joint.graph.find_nodes(op="placeholder") if joint_graphs.is_tangent(node)}
    for node in joint.graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _costs_nothing(node: fx.Node) -> bool:
    """Returns True for views, unpackings of tuples and symbolic arithmetic."""
    target = node.target
    return target in (operator.getitem, torch.ops.aten._unsafe_view.default) or is_view(node) or joint_graphs.is_sym_node(node)


def _ends_group(node: fx.Node, runs_on: str) -> bool:
    """Returns True if no gradient passes the node: an extern kernel, or an op whose sequence is fixed."""
    return kind_of(node, runs_on) is Kind.EXTERN or bool(traits_of(node) & PASSED_BY_NONE)


def _with_views(node: fx.Node) -> list[fx.Node]:
    """Returns ``node`` and the views of its results; nothing if another call reads them or if the node may not move."""
    if node.op != "call_function" or traits_of(node) & PASSED_BY_NONE or joint_graphs.must_be_in_backward(node):
        return []
    found = dict.fromkeys([node])
    stack = [node]
    while stack:
        for reader in stack.pop().users:
            if reader.op != "output" and reader not in found:
                if not _costs_nothing(reader) or not found.keys() >= set(reader.all_input_nodes):
                    return []
                found[reader] = None
                stack.append(reader)
    return list(found)
