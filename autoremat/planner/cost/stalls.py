"""Computes how long the compute stream waits for the transfers of a schedule's stays.

The compute stream runs the executions in sequence. Every other engine is a queue: it carries out one transfer after the other,
in the sequence of their issue. Four events of a stay meet the compute stream:

| Event | Moment | The compute stream |
| load  | before the execution ``load``  | issues the load |
| need  | before the execution ``need``  | waits for the end of the load |
| store | after the execution ``store``  | issues the store |
| free  | after the execution ``free``   | waits for the end of the store |

Of transfers that are issued at the same moment, the one whose end is awaited first goes first. ``Engine.COMPUTE`` is the
compute stream itself, so its transfers only add their seconds. A store has ended before its load is issued, because the stream
waits for it at ``free``. So no load waits for its store.

Copies in the two directions do not slow each other down here, because they hardly run at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.cost.durations import durations
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Engine
from autoremat.planner.graph.schedule import Schedule, Stay

LOAD, NEED, STORE, FREE = range(4)
"""The events of a stay, in the sequence in which they occur at one execution. It runs between ``NEED`` and ``STORE``."""


def stalls_of(graph: Graph, schedule: Schedule, speed: float = 1.0, seconds: NDArray[np.float64] | None = None) -> list[float]:
    """Returns, for each execution, the seconds that the compute stream waits before and after it, or transfers itself.

    Engines run at ``speed`` times the planned rate; the compute stream keeps its own. Callers that judge many stays give the
    ``seconds`` of the executions, because :func:`durations` does not depend on stays.
    """
    waits = [0.0] * len(schedule.sequence)
    if not schedule.stays:
        return waits
    lasting = durations(graph, schedule) if seconds is None else seconds
    begins = np.concatenate([[0.0], np.cumsum(lasting)]).tolist()
    idle_from, ends, waited = dict.fromkeys(Engine, 0.0), dict[tuple[int, int], float](), 0.0
    forms = schedule.forms(graph)
    for position, event, _, value in sorted(event for stay in schedule.stays for event in _events(stay)):
        now = begins[position + (event >= STORE)] + waited
        if event in (NEED, FREE):
            wait = max(0.0, ends[value, event] - now)
        else:
            transfer = forms[value].load if event == LOAD else forms[value].store
            is_compute = transfer.engine is Engine.COMPUTE
            lasts = transfer.seconds if is_compute else transfer.seconds / speed
            wait = lasts if is_compute else 0.0
            idle_from[transfer.engine] = ends[value, event + 1] = max(now, idle_from[transfer.engine]) + lasts
        waits[position] += wait
        waited += wait
    return waits


def _events(stay: Stay) -> tuple[tuple[int, int, int, int], ...]:
    """Returns the events of ``stay``: the execution, the event, the execution at which its end is awaited, the value."""
    return (
        (stay.load, LOAD, stay.need, stay.value),
        (stay.need, NEED, stay.need, stay.value),
        (stay.store, STORE, stay.free, stay.value),
        (stay.free, FREE, stay.free, stay.value),
    )
