"""Reorders the backward: gradients that nothing reads, such as those of weights, come as soon as they can be computed.

Autograd traces a layer's gradient of the input before that of the weight. The layer's input and its gradient are then live
together, although the gradient of the weight alone reads the input:

    dx = dy @ w.T          x, dy, dx               dw = x.T @ dy         x, dy, dw
    dw = x.T @ dy          x, dy, dx, dw           dx = dy @ w.T         dy, dx, dw

Only extern kernels move, so fused kernels stay whole. None moves before an op with one of the traits ``PASSED_BY_NONE``.
"""

from __future__ import annotations

import numpy as np

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import PASSED_BY_NONE
from autoremat.planner.graph.returned_gradients import returned_gradients
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.live_ranges import Buffers
from autoremat.planner.search.later_recomputation import with_backward


def with_gradients_first(graph: Graph, schedule: Schedule) -> Schedule:
    """Returns ``schedule``, which has no stays, with each such gradient behind the last execution that it reads from."""
    border, buffers = len(schedule.forward), Buffers(graph, schedule)
    ready = np.full(len(schedule.sequence), border)
    np.maximum.at(ready, buffers.reader, buffers.start[buffers.source] + 1)
    gradients, places, free_from = graph.derived(returned_gradients), [], border
    for position, index in enumerate(schedule.backward, border):
        may_move = index in gradients and not gradients[index]  # what casts read would only wait for them
        places.append((max(int(ready[position]), free_from), 0) if may_move else (position, 1))
        if index >= graph.num_forward and graph.ops[index].traits & PASSED_BY_NONE:
            free_from = position + 1
    return with_backward(graph, (index for _, index in sorted(zip(places, schedule.backward, strict=True), key=lambda e: e[0])))
