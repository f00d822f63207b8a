"""The nodes that carry out each form of a saved tensor. A further form is one more row of ``FORMS``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import fx

from autoremat.host_memory import ops
from autoremat.passes.building import Builder
from autoremat.planner.graph.forms import Form
from autoremat.torch_private.origins import OP

FORWARD, BACKWARD = "must_be_in_forward", "must_be_in_backward"


class FormNodes(Protocol):
    """Creates the nodes of a form at the insertion point of a builder. ``holder`` is the node that holds the value."""

    def begin_store(self, builder: Builder, holder: fx.Node, form: Form) -> fx.Node:
        """Returns the node that begins to store the value."""

    def end_store(self, builder: Builder, holder: fx.Node, begun: fx.Node) -> fx.Node:
        """Returns the node that crosses into the backward, once the store is complete."""

    def begin_load(self, builder: Builder, holder: fx.Node, stored: fx.Node) -> fx.Node:
        """Returns the node that begins to load the value."""

    def end_load(self, builder: Builder, holder: fx.Node, begun: fx.Node, stored: fx.Node) -> fx.Node:
        """Returns the node that the backward reads, once the load is complete."""


class OnHost:
    """A copy in the host's memory. See :mod:`autoremat.host_memory.ops`."""

    def begin_store(self, builder: Builder, holder: fx.Node, form: Form) -> fx.Node:
        return _call(builder, holder, FORWARD, "to_host", ops.copy_to_host, holder, form.host_bytes)

    def end_store(self, builder: Builder, holder: fx.Node, begun: fx.Node) -> fx.Node:
        return _call(builder, holder, FORWARD, "on_host", ops.wait_for_copy_to_host, begun, holder)

    def begin_load(self, builder: Builder, holder: fx.Node, stored: fx.Node) -> fx.Node:
        device = holder.meta["val"].device
        return _call(builder, holder, BACKWARD, "from_host", ops.copy_from_host, stored, device)

    def end_load(self, builder: Builder, holder: fx.Node, begun: fx.Node, stored: fx.Node) -> fx.Node:
        return _call(builder, holder, BACKWARD, "loaded", ops.wait_for_copy_from_host, begun, stored)


def _call(builder: Builder, holder: fx.Node, half: str, suffix: str, target: Any, *arguments: Any) -> fx.Node:
    """Returns a call of ``target`` in one half of the joint graph."""
    node = builder.make(holder, target, arguments, suffix=suffix)
    for of_the_holder in (OP, "recompute", "saved_tensor_with_no_vc_check"):
        node.meta.pop(of_the_holder, None)
    node.meta["partitioner_tag"] = half
    return node


FORMS: Mapping[str, FormNodes] = {"host": OnHost()}
"""The nodes of each form, by its name."""
