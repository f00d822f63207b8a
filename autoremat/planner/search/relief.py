"""Bounds the bytes that the stays of any plan free, for the lower bounds.

A value frees its memory once its store has ended. Until then, the engines store for the seconds that the step has run, and for
those that it has waited, converted or recomputed. So a plan that has added ``E`` seconds up to a moment has freed at most

    min(rate · (seconds of the step up to the moment + E), bytes that all forms and the host have room for)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoremat.planner.graph.forms import Engine
from autoremat.planner.graph.graph import Graph


@dataclass(frozen=True)
class Relief:
    """Upper bounds on the bytes that the stays of one call free. Without forms, they free none."""

    running: float = 0.0
    """Bytes that are freed per second while the step runs."""
    rate: float = 0.0
    """Bytes that are freed per second of waiting or converting."""
    most: float = 0.0
    """Bytes that are freed at all."""
    wanted: float = 0.0
    """Bytes that all forms together free, on a host without bound."""

    @classmethod
    def of(cls, graph: Graph, host_bytes: int | None) -> Relief:
        """Returns the bounds of a graph. ``host_bytes`` bounds the bytes on the host of all open calls; None: no bound."""
        rates: dict[Engine, float] = {}
        on_host, elsewhere, most = 0.0, 0.0, 0.0
        for value in (graph.values[v] for v in graph.forward_values):
            for form in value.forms:
                relief, store = value.bytes - form.device_bytes, form.store
                seconds = store.seconds
                if store.engine is Engine.COMPUTE and form.load.engine is Engine.COMPUTE:
                    seconds += form.load.seconds
                rate = relief / seconds if seconds else math.inf if relief else 0.0
                rates[store.engine] = max(rates.get(store.engine, 0.0), rate)
            on_device = [value.bytes - form.device_bytes for form in value.forms if not form.host_bytes]
            elsewhere += max(on_device, default=0)
            on_host = max([on_host, *((value.bytes - f.device_bytes) / f.host_bytes for f in value.forms if f.host_bytes)])
            most += max((value.bytes - form.device_bytes for form in value.forms), default=0)
        wanted = most
        if host_bytes is not None:
            most = min(most, elsewhere + on_host * host_bytes / graph.in_flight)
        running = sum(rate for engine, rate in rates.items() if engine is not Engine.COMPUTE)
        return cls(running, sum(rates.values()), most, wanted)

    def carried(self, seconds: float) -> float:
        """Returns the most bytes that are freed in a step that has run for ``seconds``, without waiting."""
        return min(self.running * seconds, self.most) if 0.0 < self.running < math.inf else min(self.running, self.most)
