"""The calls of one graph that are open at once, and the bytes that their caller holds beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoremat.planner.graph.graph import Calls, Graph


@dataclass(frozen=True, slots=True)
class OpenCalls:
    """Calls of a graph that are open at once during a step of several micro-batches."""

    number: int = 1
    """Most calls that are open at once, the running one included."""
    accumulates: bool = False
    """True if the gradients of earlier micro-batches are live beside a call, because later ones add to them."""
    sends_gradients: bool = False
    """True if the gradients of inputs are live until the next call has made its own, as in a pipeline, which sends them."""

    def resident_bytes(self, graph: Graph, accumulated_bytes: int) -> int:
        """Returns the bytes that are live beside all open calls of ``graph``.

        ``accumulated_bytes`` is the size of the gradients that later micro-batches add to.
        """
        sent = sum(graph.values[v].bytes for v in graph.backward_outputs) - accumulated_bytes if self.sends_gradients else 0
        return sent + (accumulated_bytes if self.accumulates else 0)

    def of(self, graph: Graph, accumulated_bytes: int) -> Graph:
        """Returns ``graph`` with these open calls."""
        return replace(graph, calls=Calls(self.number, self.resident_bytes(graph, accumulated_bytes)))
