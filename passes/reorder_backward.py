"""Moves the backward's own ops of a joint graph into the sequence of a schedule.

Each op stands behind what it reads, so the helpers that it reads (views, tuple unpacking) move with it:

         mm ── dx = mm_1(dy, w) ── view(x) ── dw = mm_2(dy, view) ── dx2 = mul(dx)
    becomes, if mm_2 runs before mm_1,
         mm ── view(x) ── dw = mm_2(dy, view) ── dx = mm_1(dy, w) ── dx2 = mul(dx)
"""

from __future__ import annotations

from itertools import takewhile

from torch import fx

from autoremat.basics.errors import PlanInvalid
from autoremat.capture import communication
from autoremat.capture.capture import Capture
from autoremat.planner.graph.schedule import Schedule


def reorder_backward(joint: fx.GraphModule, capture: Capture, schedule: Schedule) -> int:
    """Moves the backward's own ops of ``joint``, in place. Returns the number of ops that stand at another place.

    ``capture`` is that of ``joint``. Raises ``PlanInvalid`` if an op would stand before what it reads.
    """
    assert capture.joint is joint
    first, own = capture.graph.num_forward, schedule.own(capture.graph)
    moved = sum(index != place for place, index in enumerate(own, first))
    if not moved:
        return 0
    output = joint.graph.output_node()
    begin = capture.op_nodes[first]
    left = dict.fromkeys([begin, *reversed(list(takewhile(lambda node: node is not begin, reversed(joint.graph.nodes))))])
    del left[output]
    waiting = {capture.op_nodes[index] for index in own}

    def place(node: fx.Node) -> None:
        if node in left:
            del left[node]
            for operand in node.all_input_nodes:
                if operand in waiting:
                    raise PlanInvalid(f"the schedule runs an op before {operand.name}, which it reads")
                place(operand)
            output.prepend(node)

    for index in own:
        call = capture.op_nodes[index]
        waiting.remove(call)
        for node in (call, *communication.waits_for(call)):
            place(node)
    for node in list(left):
        place(node)
    return moved
