"""Finds the parts of a forward: layers, modules, attention cores, and segments between narrow places.

*Layers* are calls of numbered modules in one container, such as "model.layers.0". Numbered modules count if they share their
class with another one in the container; if none does, all count. If layers are nested, the outermost count.

Models that are written as functions have no such modules, or only for a small part of their bytes. Their layers are the longest
sequence of ops that repeats itself.

An *attention core* reaches from the product of queries and keys to the product with the values, including the softmax. A fused
attention kernel is a core of its own (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
2022).

*Segments* lie between narrow places. A place lies between two forward ops, and its width is the bytes of the values that cross
it. Values that live longer than a segment (masks, rotary tables, encoder outputs, U-Net skips) cross most places, and do not
count.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Op, Scope

Ops = tuple[int, ...]
"""Numbers of forward ops, in sequence."""

LEAST_COVERED = 0.5
"""Modules count as layers if their results have at least this share of the bytes of the repeating ops' results."""


@dataclass(frozen=True)
class Forward:
    """The forward of ``graph``, divided into the parts that policies ask for."""

    graph: Graph

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The forward ops."""
        return self.graph.ops[: self.graph.num_forward]

    @cached_property
    def scopes(self) -> tuple[tuple[Scope, ...], ...]:
        """For each forward op, the modules that were running.

        An op that a compiler pass inserted has no modules. It gets those that were running both before and after it.
        """
        before = [op.scopes for op in self.ops]
        after = list(before)
        for index in range(1, len(before)):
            before[index] = before[index] or before[index - 1]
        for index in range(len(after) - 2, -1, -1):
            after[index] = after[index] or after[index + 1]
        return tuple(
            op.scopes or tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
            for op, one, other in zip(self.ops, before, after, strict=True)
        )

    @cached_property
    def layers(self) -> tuple[Ops, ...]:
        """The layers in sequence; empty if there is neither a container nor a repetition."""
        numbered = {s for scopes in self.scopes for s in scopes if s.path.rpartition(".")[2].isdigit()}
        children = Counter((s.path.rpartition(".")[0], s.kind) for s in numbered)
        alike = {s for s in numbered if children[s.path.rpartition(".")[0], s.kind] > 1}
        by_module, repeated = self.calls_of((alike or numbered).__contains__), self._repeated()
        return by_module if by_module and self._bytes(by_module) >= LEAST_COVERED * self._bytes(repeated) else repeated

    def calls_of(self, wanted: Callable[[Scope], bool]) -> tuple[Ops, ...]:
        """Returns the ops of each call of a module that is ``wanted``, in sequence.

        If such modules are nested, the outermost counts.
        """
        calls: dict[Scope, list[int]] = defaultdict(list)
        for index, scopes in enumerate(self.scopes):
            if (outermost := next(filter(wanted, scopes), None)) is not None:
                calls[outermost].append(index)
        return tuple(map(tuple, calls.values()))

    def up_to_products(self, ops: Ops, others: Collection[int]) -> Ops:
        """Returns ``ops``, the call of a module, with the ops behind them up to the next matrix product.

        The added ops belong to the module around the call, depend on its results, and are not among ``others``.
        """
        around = self.scopes[ops[0]][:-1]
        found = list(ops)
        reached = {v for index in ops for v in self.ops[index].outputs}
        for index in range(ops[-1] + 1, len(self.ops)):
            op = self.ops[index]
            ends = bool(op.flops) or index in others or self.scopes[index][: len(around)] != around
            if not ends and reached.intersection(op.inputs):
                found.append(index)
                reached.update(op.outputs)
        return tuple(found)

    def segments(self, count: int) -> tuple[Ops, ...]:
        """Returns about ``count`` segments with about equally many bytes of results, cut at narrow places."""
        filled = np.cumsum(self.graph.made_bytes[: len(self.ops)], dtype=np.int64)
        total, chosen, width = int(filled[-1]) if len(filled) else 0, list[int](), self._width(len(self.ops) // count)
        for part in range(1, count):
            low, high = np.searchsorted(filled, [total * (part - 0.5) / count, total * (part + 0.5) / count])
            low, high = max(low, chosen[-1] + 1 if chosen else 0), min(high, len(filled) - 1)
            if low < high:
                narrowest = np.flatnonzero(width[low:high] == width[low:high].min()) + low
                distance = np.abs(filled[narrowest] - total * part / count)
                chosen.append(int(narrowest[distance.argmin()]))
        ends = pairwise((0, *(place + 1 for place in chosen), len(self.ops)))
        return tuple(tuple(range(begin, end)) for begin, end in ends if begin < end)

    def _width(self, longest: int) -> NDArray[np.int64]:
        """Returns, for each forward op, the bytes of values that cross from it to later ones and live for at most so many."""
        count = len(self.ops)
        change = np.zeros(count + 1, dtype=np.int64)
        for index, op in enumerate(self.ops):
            for value in op.outputs:
                last = max((r for r in self.graph.readers[value] if r < count), default=index)
                if last - index <= longest:
                    change[index] += self.graph.values[value].bytes
                    change[last] -= self.graph.values[value].bytes
        return np.cumsum(change)[:count]

    @cached_property
    def attention_cores(self) -> tuple[Ops, ...]:
        """The attention cores in sequence."""
        found = (self._core(index) for index in range(len(self.ops)))
        return tuple(core for core in found if core)

    def _bytes(self, parts: Iterable[Ops]) -> int:
        return sum(self.graph.made_bytes[index] for part in parts for index in part)

    # -- layers by repetition ------------------------------------------------------------------------------------------

    def _repeated(self) -> tuple[Ops, ...]:
        """Returns the repetitions of the longest stretch that is one sequence of ops again and again."""
        kinds: dict[object, int] = {}
        signs = [(op.target, *(self.graph.values[v].bytes for v in op.outputs)) for op in self.ops]
        numbers = np.array([kinds.setdefault(sign, len(kinds)) for sign in signs], dtype=np.int64)
        start, length, period = 0, 0, 0
        for candidate in range(2, len(numbers) // 2 + 1):
            begin, run = _longest_run(numbers[:-candidate] == numbers[candidate:])
            if run >= candidate and run + candidate > length:
                start, length, period = begin, run + candidate, candidate
        if not period:
            return ()
        count = length // period
        width = self._width(period)
        # The sequence can begin at any of its ops. It begins where the fewest bytes cross from one repetition to the next.
        places = [start + shift + period * np.arange(count) for shift in range(length - count * period + 1)]
        first = min(places, key=lambda place: int(width[np.maximum(place - 1, 0)].sum()))[0]
        return tuple(tuple(range(first + i * period, first + (i + 1) * period)) for i in range(count))

    # -- attention -----------------------------------------------------------------------------------------------------

    @cached_property
    def _results_of_products(self) -> frozenset[int]:
        return frozenset(v for op in self.ops if op.flops for v in op.outputs)

    def _core(self, last: int) -> Ops:
        if "scaled_dot_product" in self.ops[last].target or self.ops[last].target.startswith("flex_attention"):
            return (last,)
        if not _is_product(self.ops[last]):
            return ()
        leading = self.graph.ancestors([last], self._results_of_products)
        products = {p for index in leading for p in self.graph.producers(self.ops[index].inputs)} - leading
        between = leading - {last}
        softmax = {index for index in between if "softmax" in (self.ops[index].decomposed_from or self.ops[index].target)}
        if not softmax:
            return ()
        inside = self._descendants({p for p in products if _is_product(self.ops[p])}, between)
        first = {p for p in products if _is_product(self.ops[p]) and self._descendants({p}, between) & softmax}
        return tuple(sorted({*inside, *first, last})) if first else ()

    def _descendants(self, roots: set[int], among: set[int]) -> set[int]:
        reached = {v for root in roots for v in self.ops[root].outputs}
        found = set()
        for index in sorted(among):
            if reached.intersection(self.ops[index].inputs):
                found.add(index)
                reached.update(self.ops[index].outputs)
        return found


def _longest_run(flags: NDArray[np.bool_]) -> tuple[int, int]:
    edges = np.diff(np.concatenate(([0], flags.astype(np.int8), [0])))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if not len(starts):
        return 0, 0
    longest = int((ends - starts).argmax())
    return int(starts[longest]), int(ends[longest] - starts[longest])


def _is_product(op: Op) -> bool:
    return op.target.startswith(("aten.bmm", "aten.baddbmm", "aten.matmul"))
