"""The moments of a step whose graphs run one after the other: the ledger of a function that was split, without a measurement.

The forwards run in sequence, and the backwards in reverse. A *border* is a tensor that one graph hands to later ones, or that
the function receives or returns. Each plan counts the borders that it keeps live, so a border that several plans keep is
counted several times. The base bytes of a moment correct that for the borders that every plan of a graph keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoremat.planner.multigraph.ledger import Moment


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
    """For each border, the number of times that every plan of the graph counts it as saved."""
    freed_bytes: int = 0
    """Bytes of the gradients that hooks free right after its backward, and of what such a hook allocates."""


@dataclass(frozen=True)
class Frame:
    """The graphs of a function in the sequence of their forwards, and the tensors at their borders."""

    parts: Sequence[Part]
    borders: Sequence[Border]

    def moments(self) -> tuple[Moment, ...]:
        """Returns the moments of the step."""
        numbers = range(len(self.parts))
        begun = [self.forward(number) for number in numbers]
        ended = [moment for number in reversed(numbers) for moment in self.backward(number)]
        return tuple(moment for moment in (*begun, self.between(), *ended) if moment is not None)

    def forward(self, number: int) -> Moment | None:
        """Returns the moment at which the forward of part ``number`` runs."""
        part = self.parts[number]
        if part.graph is None:
            return None
        return Moment(self._borders_live(number, number), self._open(number), part.graph)

    def between(self) -> Moment:
        """Returns the moment between the last forward and the first backward."""
        count = len(self.parts)
        return Moment(self._borders_live(count, None), self._open(count))

    def backward(self, number: int) -> list[Moment]:
        """Returns the moments at which the backward of part ``number`` runs, and after it."""
        part = self.parts[number]
        finished = sum(later.finished_bytes for later in self.parts[number + 1 :])
        waiting = sum(border.gradient_bytes for border in self.borders if self._awaits(border, number))
        # Autograd holds both summands and the sum while it adds a gradient to one that waits.
        added = sum(b.gradient_bytes for b in self.borders if number in b.read_by and self._awaits(b, number))
        new = sum(b.gradient_bytes for b in self.borders if number in b.read_by and b.made_by is not None)
        before = self._borders_live(number, None) + sum(border.given_bytes for border in self.borders)
        ended = part.finished_bytes + part.freed_bytes
        after = Moment(before + finished + ended + waiting + added + new, self._open(number))
        if part.graph is None:
            return [after]
        # The plan counts its outputs as live throughout; those that something else holds are among the borders. The gradients
        # that it receives count there, too.
        received = sum(b.given_bytes for b in self.borders if b.made_by == number and not b.read_by)
        base = before - received - part.output_bytes + finished + waiting
        running = Moment(base, self._open(number), part.graph, backward=True)
        return [running, after]

    def _open(self, number: int) -> tuple[int, ...]:
        """Returns the graphs of the parts before ``number``, whose calls are open while its halves run."""
        return tuple(part.graph for part in self.parts[:number] if part.graph is not None)

    def _borders_live(self, number: int, read_from: int | None) -> int:
        """Returns the bytes of the live borders beyond those that the plans of the parts before ``number`` count.

        ``read_from`` is the part whose forward runs, so the borders that it and later parts receive are live. It is None in the
        backward.
        """
        kept = self._kept(number)
        return sum(
            border.bytes * (self._is_live(border, number, read_from, kept[place]) - kept[place])
            for place, border in enumerate(self.borders)
        )

    def held_elsewhere(self, number: int) -> set[int]:
        """Returns the borders that the base bytes count while the backward of part ``number`` runs."""
        kept = self._kept(number)
        return {place for place, border in enumerate(self.borders) if self._is_live(border, number, None, kept[place])}

    def _kept(self, number: int) -> Counter[int]:
        """Returns the borders that the plans of the parts before ``number`` count, each with the number of these plans."""
        kept = Counter[int]()
        for part in self.parts[:number]:
            kept.update(part.keeps)
        return kept

    def _is_live(self, border: Border, number: int, read_from: int | None, kept: int) -> bool:
        if border.made_by is None:
            return False
        if border.leaves and read_from is None:
            return True
        if border.made_by >= number:
            return False
        is_read = read_from is not None and any(reader >= read_from for reader in border.read_by)
        return border.leaves or is_read or kept > 0

    @staticmethod
    def _awaits(border: Border, number: int) -> bool:
        """Returns True if a gradient of the border waits for further summands while the backward of part ``number`` runs."""
        return border.made_by is not None and border.made_by < number and any(reader > number for reader in border.read_by)
