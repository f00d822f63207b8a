"""Torch's private names for losses that torch computes in chunks of rows itself."""

from __future__ import annotations

from torch import fx

from autoremat.torch_private import higher_order

CHUNKED_OP = "torch_nn._linear_cross_entropy_batch_chunked"
"""The beginning of the names of the custom ops of ``F.linear_cross_entropy``."""


def chunked_by(joint: fx.GraphModule) -> str:
    """Returns what computes a loss of ``joint`` in chunks: a function of torch or a setting of Inductor; empty if nothing does.

    Both make one opaque op of the projection and the loss, which no later pass chunks again.
    """
    for node in joint.graph.nodes:
        if str(node.target).startswith(CHUNKED_OP):
            return "torch.nn.functional.linear_cross_entropy"
        if any(body.meta.get("produced_by_chunker") for body in higher_order.bodies(node)):
            return "Inductor (auto_chunker.enable)"
    return ""
