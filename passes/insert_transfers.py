"""Inserts the stays of a schedule into the joint graph: each store in the forward, each load in the backward.

Before, a saved value crosses from the forward into the backward as it is. Afterwards what its form keeps of it crosses:

         tanh ── mm ── ... ── tanh_backward(tanh)
    becomes, for a stay on the host,
         tanh ── tanh_to_host ── mm ── tanh_on_host(tanh_to_host, tanh) ── ...
         ... ── tanh_from_host(tanh_on_host) ── mm_1 ── tanh_loaded(tanh_from_host, tanh_on_host) ── tanh_backward(tanh_loaded)

A store may also end in the backward. Then `tanh_to_host` crosses, and `tanh` beside it until the wait.

:mod:`autoremat.passes.forms` has the nodes of each form. The loads are inserted along with the recomputation, because
recomputed ops read them too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import fx

from autoremat.basics.errors import PlanInvalid
from autoremat.capture import communication
from autoremat.capture.capture import Capture
from autoremat.passes.building import Builder
from autoremat.passes.forms import BACKWARD, FORMS, FORWARD, FormNodes
from autoremat.planner.graph.op import Form
from autoremat.planner.graph.schedule import Schedule, Stay

STORED = "autoremat_stored_value"
"""Key of ``node.meta`` for the number of the value that the node keeps in its form from the forward to the backward."""


@dataclass(frozen=True)
class _Transfers:
    stay: Stay
    form: Form
    nodes: FormNodes
    holder: fx.Node
    """The node that holds the value in the forward."""


def _transfers(capture: Capture, schedule: Schedule) -> list[_Transfers]:
    found: list[_Transfers] = []
    for stay in schedule.stays:
        value, holder = capture.graph.values[stay.value], capture.value_nodes[stay.value]
        form = next(form for form in value.forms if form.name == stay.form)
        if holder is None or stay.form not in FORMS:
            raise PlanInvalid(f"{value.name} has no form {stay.form!r} that a graph can carry out: it may have {sorted(FORMS)}")
        found.append(_Transfers(stay, form, FORMS[stay.form], holder))
    return found


def insert_stores(joint: fx.GraphModule, capture: Capture, schedule: Schedule) -> int:
    """Inserts the stores of ``schedule`` into the forward of ``joint``, in place. Returns their number.

    ``capture`` is that of ``joint``. Raises ``PlanInvalid`` for a form that no graph can carry out.
    """
    assert capture.joint is joint
    transfers = _transfers(capture, schedule)
    _gather_forward(capture, [one.holder for one in transfers])
    order = list(joint.graph.nodes)
    place = {node: number for number, node in enumerate(order)}
    begun: dict[int, fx.Node] = {}
    latest = 0
    # After the same execution, stores begin before others are waited for.
    due = [(one.stay.store, False, one) for one in transfers]
    due += [(one.stay.free, True, one) for one in transfers if one.stay.free < len(schedule.forward)]
    for position, is_end, one in sorted(due, key=lambda due: (due[0], due[1], due[2].stay.value)):
        call, value = capture.op_nodes[schedule.forward[position]], one.stay.value
        latest = max(latest, place[one.holder], *(place[node] for node in (call, *communication.waits_for(call))))
        with joint.graph.inserting_before(order[latest + 1]):
            builder = Builder.beside(one.holder)
            if is_end:
                begun[value] = one.nodes.end_store(builder, one.holder, begun[value], FORWARD)
            else:
                begun[value] = one.nodes.begin_store(builder, one.holder, one.form)
    for value, node in begun.items():
        node.meta[STORED] = value
    return len(transfers)


def _gather_forward(capture: Capture, holders: list[fx.Node]) -> None:
    """Moves what the forward runs, and ``holders``, before the backward: ops that write to inputs are traced later."""
    begin = next(iter(capture.op_nodes[capture.graph.num_forward :]), capture.joint.graph.output_node())
    late = set(itertools.takewhile(lambda node: node is not begin, reversed(capture.joint.graph.nodes)))

    def move(node: fx.Node) -> None:
        if node in late:
            late.remove(node)
            for operand in node.all_input_nodes:
                move(operand)
            begin.prepend(node)

    for call in capture.op_nodes[: capture.graph.num_forward]:
        for node in (call, *communication.waits_for(call)):
            move(node)
    for holder in holders:
        move(holder)


class Loads:
    """The loads of a schedule, and the ends of stores in its backward. They are inserted on the way through the backward."""

    def __init__(self, capture: Capture, schedule: Schedule) -> None:
        stored = stored_values(capture.joint)
        self.transfers = _transfers(capture, schedule)
        self.stored = {one.stay.value: stored[one.stay.value] for one in self.transfers}
        self.begun: dict[int, fx.Node] = {}
        self.border = len(schedule.forward)

    def before(self, position: int, cursor: fx.Node) -> dict[int, fx.Node]:
        """Inserts what is due before the execution at ``position``, and before ``cursor``.

        Returns the nodes that hold the values whose loads are complete there, by value.
        """
        complete: dict[int, fx.Node] = {}
        with cursor.graph.inserting_before(cursor):
            for one in self.transfers:
                if self.border <= one.stay.free == position - 1:
                    value, builder = one.stay.value, Builder.beside(one.holder)
                    self.stored[value] = one.nodes.end_store(builder, one.holder, self.stored[value], BACKWARD)
            for one in self.transfers:
                if one.stay.load == position:
                    value, builder = one.stay.value, Builder.beside(one.holder)
                    self.begun[value] = one.nodes.begin_load(builder, one.holder, self.stored[value])
            for one in self.transfers:
                if one.stay.need == position:
                    value, builder = one.stay.value, Builder.beside(one.holder)
                    complete[value] = one.nodes.end_load(builder, one.holder, self.begun[value], self.stored[value])
        return complete


def stored_values(joint: fx.GraphModule) -> dict[int, fx.Node]:
    """Returns the nodes that keep stored values from the forward to the backward, by value."""
    return {node.meta[STORED]: node for node in joint.graph.nodes if STORED in node.meta}
