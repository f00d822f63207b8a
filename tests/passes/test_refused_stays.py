"""Stays that do not fit a graph or the settings of its compilation are refused, with the tensor to blame."""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest import mock

import pytest
import stays
import torch
from test_insert_transfers import compiled, model_and_input, step

from autoremat import PlanInvalid
from autoremat.basics.errors import find_cause
from autoremat.capture.capture import Capture
from autoremat.compiler import peers
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.passes import apply_plan
from autoremat.planner.graph.schedule import Schedule, build_schedule


def captured() -> tuple[Capture, Schedule]:
    """A capture whose values may stay on the host, and its plan without stays."""
    found: list[PricedGraph] = []

    def keep(priced: PricedGraph, *_: object) -> None:
        found.append(priced)
        raise PlanInvalid("as if")

    model, x = model_and_input()
    with mock.patch.object(peers, "plan_graph", keep), pytest.raises(Exception, match="as if"):
        torch.compile(model, backend="autoremat", options={"compiler": "aot_eager", "memory_budget": 1.0})(x)
    (priced,) = found
    graph = stays.with_host_forms(priced.graph)
    return replace(priced.captured, graph=graph), build_schedule(graph, graph.forward_values)


BAD = {
    "has no form 'bytes'": lambda stay, schedule: replace(stay, form="bytes"),
    "does not begin in the forward": lambda stay, schedule: replace(stay, free=len(schedule.forward)),
    "and end in the backward": lambda stay, schedule: replace(stay, load=stay.need + 1),
    "is stored before it is computed": lambda stay, schedule: replace(stay, store=0),
    "before it is loaded": lambda stay, schedule: replace(stay, need=len(schedule.sequence) - 1),
}


@pytest.mark.parametrize("message", BAD)
def test_a_stay_that_does_not_fit_is_refused(message):
    capture, schedule = captured()
    stay = stays.as_short_as_possible(capture.graph, schedule).stays[-1]
    bad = replace(schedule, stays=(BAD[message](stay, schedule),))
    with pytest.raises(PlanInvalid, match=message):
        apply_plan(capture, bad, ())


def test_a_value_that_does_not_cross_has_no_stay_and_another_one_has_one():
    capture, schedule = captured()
    graph, (stay, *_) = capture.graph, stays.as_short_as_possible(capture.graph, schedule).stays
    inside = next(v for v in graph.forward_values if v not in schedule.saved(graph) and graph.values[v].forms)
    for wrong in (replace(stay, value=inside),), (stay, stay):
        with pytest.raises(PlanInvalid, match="does not cross into the backward, or has a stay already"):
            apply_plan(capture, replace(schedule, stays=wrong), ())


def test_a_wrapper_in_cpp_is_refused():
    model, x = model_and_input()
    run = functools.partial(step, model=model, x=x)
    with pytest.raises(Exception, match="does not go together with a wrapper in C") as caught:
        compiled(model, stays.as_short_as_possible, run, compiler="inductor", cpp_wrapper=True)
    assert find_cause(caught.value, PlanInvalid) is not None
