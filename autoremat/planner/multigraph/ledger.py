"""Ledger of a step: the memory of all calls of compiled graphs.

A step is a list of *moments*. At each, the forward or the backward of a call runs, or code that no plan controls. The live
bytes are the sum of three terms: ``base_bytes``, the saved bytes of the open calls, and the peak of the running half. No plan
controls ``base_bytes``. A call is *open* from its forward to its backward.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from autoremat.planner.graph.graph import Calls, Graph
from autoremat.planner.plans.limits import PlanPoint


@dataclass(frozen=True, slots=True)
class Moment:
    """A stretch of the step during which a single half runs, or none."""

    base_bytes: int
    """Bytes above the step's start that are live under every plan. Negative if a plan's peak counts values that are not
    live."""
    open: tuple[int, ...] = ()
    """Graphs of the other open calls, one entry for each call."""
    running: int | None = None
    """Graph whose half runs. None if no half runs; ``base_bytes`` is then the peak of the code that runs instead."""
    backward: bool = False

    @property
    def calls(self) -> tuple[int, ...]:
        """Graphs of all open calls, that of the running one included."""
        return self.open if self.running is None else (*self.open, self.running)

    def live_bytes(self, points: Sequence[PlanPoint]) -> int:
        """Returns the live bytes, if each graph ``g`` follows ``points[g]``."""
        half = 0 if self.running is None else points[self.running].peak_bytes(self.backward)
        return self.base_bytes + sum(points[g].saved_bytes for g in self.open) + half

    def host_bytes(self, points: Sequence[PlanPoint]) -> int:
        """Returns the bytes on the host, if each graph ``g`` follows ``points[g]``."""
        return sum(points[g].host_bytes for g in self.calls)


def distinct(moments: Iterable[Moment]) -> list[Moment]:
    """Returns the moments without those of the same calls that have fewer base bytes."""
    fullest_of: dict[tuple[object, ...], Moment] = {}
    for moment in sorted(moments, key=lambda moment: moment.base_bytes):
        fullest_of[tuple(sorted(moment.open)), moment.running, moment.backward] = moment
    return list(fullest_of.values())


@dataclass(frozen=True, slots=True)
class OpenCalls:
    """Calls of a graph that are open at once during a step of several micro-batches."""

    number: int = 1
    """Most calls that are open at once, the running one included."""
    accumulates: bool = False
    """True if the gradients of earlier micro-batches are live beside a call, because later ones add to them."""
    sends_gradients: bool = False
    """True if the gradients of inputs are live until the next call has made its own, as in a pipeline, which sends them."""

    def of(self, graph: Graph, accumulated_bytes: int) -> Graph:
        """Returns ``graph`` with these open calls. Later micro-batches add to gradients of ``accumulated_bytes``."""
        sent = sum(graph.values[v].bytes for v in graph.backward_outputs) - accumulated_bytes if self.sends_gradients else 0
        return replace(graph, calls=Calls(self.number, sent + self.accumulates * accumulated_bytes))


# -- the moments of graphs that run one after the other --------------------------------------------------------------------

# The forwards run in sequence, and the backwards in reverse. A *border* is a tensor that one graph hands to later ones, or that
# the function receives or returns. Each plan counts the borders that it keeps live, so a border that several plans keep is
# counted several times. The base bytes of a moment correct that for the borders that every plan of a graph keeps.


@dataclass(frozen=True, slots=True)
class Border:
    """A tensor at the border of a graph."""

    bytes: int
    made_by: int | None
    """The graph that returns it; None for a tensor that the function receives, which exists before the step."""
    read_by: tuple[int, ...]
    """The graphs that receive it, in sequence."""
    leaves: bool = False
    """True if the function returns it. The caller may hold it to the end of the step."""
    gradient_bytes: int = 0
    """Bytes of its gradient; 0 if it needs none."""
    given_bytes: int = 0
    """Bytes of the gradient that the caller of the backward gives, and holds to its end."""


@dataclass(frozen=True, slots=True)
class Part:
    """One graph of the function."""

    graph: int | None
    """Index of the graph in the step; None if it has no choice of plans."""
    output_bytes: int = 0
    """Bytes of the outputs that the peaks of its plans count."""
    finished_bytes: int = 0
    """Bytes of the gradients that stay after its backward."""
    keeps: Counter[int] = field(default_factory=Counter)
    """For each border, how often every plan of the graph counts it as saved. Without it a border counts twice."""
    freed_bytes: int = 0
    """Bytes of the gradients that hooks free right after its backward, and of what such a hook allocates."""


def moments_of(parts: Sequence[Part], borders: Sequence[Border]) -> tuple[Moment, ...]:
    """Returns the moments of the parts, in the sequence of their forwards, with tensors at their ``borders``."""
    forwards = [
        Moment(_live_bytes(parts[:number], borders, number), _graphs(parts[:number]), part.graph)
        for number, part in enumerate(parts)
        if part.graph is not None
    ]
    between = Moment(_live_bytes(parts, borders), _graphs(parts))
    backwards = (moment for number in reversed(range(len(parts))) for moment in _backward(number, parts, borders))
    return (*forwards, between, *backwards)


def _backward(number: int, parts: Sequence[Part], borders: Sequence[Border]) -> list[Moment]:
    """Returns the moments at which the backward of part ``number`` runs, and after it."""
    part, before, others = parts[number], parts[:number], _graphs(parts[:number])
    finished = sum(later.finished_bytes for later in parts[number + 1 :])
    awaiting = [b for b in borders if b.made_by is not None and b.made_by < number and any(r > number for r in b.read_by)]
    waiting = sum(border.gradient_bytes for border in awaiting)
    # Autograd holds both summands and the sum while it adds a gradient to one that waits.
    added = sum(border.gradient_bytes for border in awaiting if number in border.read_by)
    new = sum(b.gradient_bytes for b in borders if number in b.read_by and b.made_by is not None)
    given = sum(border.given_bytes for border in borders)
    ended = finished + part.finished_bytes + part.freed_bytes
    after = Moment(_live_bytes(before, borders) + given + ended + waiting + added + new, others)
    if part.graph is None:
        return [after]
    # The plan counts its outputs as live throughout; those that something else holds are among the borders. The gradients that
    # it receives count there, too.
    received = sum(b.given_bytes for b in borders if b.made_by == number and not b.read_by)
    live = _live_bytes(parts[: number + 1], borders)
    return [Moment(live + given - received - part.output_bytes + finished + waiting, others, part.graph, backward=True), after]


def _graphs(parts: Sequence[Part]) -> tuple[int, ...]:
    return tuple(part.graph for part in parts if part.graph is not None)


def _live_bytes(counting: Sequence[Part], borders: Sequence[Border], forward: int | None = None) -> int:
    """Returns the bytes of the live borders beyond those that the plans of the parts ``counting`` count.

    ``forward`` is the part whose forward runs, so the borders that it and later parts receive are live. It is None in the
    backward, where the borders that leave the function are.
    """
    kept = sum((part.keeps for part in counting), Counter[int]())
    total = 0
    for place, border in enumerate(borders):
        is_made = border.made_by is not None and (forward is None or border.made_by < forward)
        is_read = forward is not None and any(reader >= forward for reader in border.read_by)
        total += border.bytes * ((is_made and (border.leaves or is_read or kept[place] > 0)) - kept[place])
    return total
