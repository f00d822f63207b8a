"""Plans with stays that a test chooses: forms for the values of what is compiled, and stays at random."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch
from captured import Seen
from strategies import places_of

from autoremat import host_memory
from autoremat.capture import forms
from autoremat.compiler import compile_loop
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.compiler.planned_graph import PlannedGraph
from autoremat.host_memory.links import link_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Engine, Form, Role, Transfer, Value
from autoremat.planner.graph.schedule import Schedule, Stay
from autoremat.planner.plans.plan import Plan
from autoremat.planner.settings import Settings
from autoremat.report.report import Report

Choose = Callable[[Graph, Schedule], Schedule]
"""Returns a schedule with stays for one without."""


def host_form(size: int) -> Form:
    return Form("host", Transfer(Engine.TO_HOST, 0.0), Transfer(Engine.FROM_HOST, 0.0), host_bytes=size)


@dataclass(frozen=True)
class Statistics:
    """The bytes on the host for one device: of all buffers, of those that hold a copy, and what was moved."""

    held_bytes: int = 0
    used_bytes: int = 0
    to_host_bytes: int = 0
    from_host_bytes: int = 0


def statistics(device: torch.device | str) -> Statistics:
    link = link_of(torch.empty(0, device=device).device)  # of the current card, if no number is named
    unused = sum(size * len(free) for size, free in list(link.pool._free.items()))
    return Statistics(link.pool.held_bytes, link.pool.held_bytes - unused, **link.moved)


def bytes_of_stays(report: Report) -> int:
    """The bytes of the values that a plan keeps in other forms, as they are."""
    return sum(report.plan.graph.values[value].bytes for value in report.plan.schedule.forms(report.plan.graph))


def bytes_on_device(report: Report) -> int:
    return sum(form.device_bytes for form in report.plan.schedule.forms(report.plan.graph).values())


def with_host_forms(graph: Graph) -> Graph:
    """The graph, whose computed values may all stay on the host."""

    def with_form(value: Value) -> Value:
        return replace(value, forms=(host_form(value.bytes),)) if value.role is Role.COMPUTED and value.bytes else value

    return replace(graph, values=tuple(map(with_form, graph.values)))


def may_stay(graph: Graph, schedule: Schedule) -> list[int]:
    """The values that may have a stay on the host."""
    held = {*graph.forward_outputs, *graph.backward_outputs}
    return sorted(v for v in schedule.saved(graph) if graph.values[v].forms and v not in held)


def as_planned(_: Graph, schedule: Schedule) -> Schedule:
    return schedule


def at_random(seed: int, share: float = 0.7) -> Choose:
    """Stays for that share of the values that may have one, each at random positions."""

    def choose(graph: Graph, schedule: Schedule) -> Schedule:
        numbers, begin = random.Random(seed), len(schedule.forward)

        def stay(value: int) -> Stay:
            made, last_read, first_read = places_of(graph, schedule, value)
            store = numbers.randrange(made, begin)
            need = numbers.randint(begin, first_read)
            load = numbers.randint(begin, need)
            free = numbers.randrange(max(store, last_read), numbers.choice([begin, load]))
            return Stay(value, "host", store, free, load, need)

        chosen = [v for v in may_stay(graph, schedule) if numbers.random() < share]
        return replace(schedule, stays=tuple(map(stay, chosen)))

    return choose


def as_short_as_possible(graph: Graph, schedule: Schedule) -> Schedule:
    """Stays for all values that may have one: stored at once, freed after the last read, and loaded right before the first."""

    def stay(value: int) -> Stay:
        made, last_read, first_read = places_of(graph, schedule, value)
        return Stay(value, "host", made, last_read, first_read, first_read)

    return replace(schedule, stays=tuple(map(stay, may_stay(graph, schedule))))


@contextlib.contextmanager
def small_device() -> Iterator[None]:
    """Lets the CPU stand for a device with a link to the host, and values of 1 KiB have forms."""
    lower = Settings(least_form_bytes=1024)
    with mock.patch.object(forms, "settings", lower), host_memory.stand_in():
        yield


@contextlib.contextmanager
def staying(choose: Choose) -> Iterator[Seen]:
    """Gives the plan of each graph that is compiled in the block the stays that ``choose`` returns. Collects the plans."""
    found = Seen()
    original = compile_loop.plan_graph

    def plan_graph(priced: PricedGraph, extra_headroom_bytes: int = 0) -> PlannedGraph:
        priced = replace(priced, captured=replace(priced.captured, graph=with_host_forms(priced.graph)))
        planned = original(priced, extra_headroom_bytes)
        plan = Plan.of(planned.plan.graph, choose(planned.plan.graph, planned.plan.schedule), planned.plan.label)
        found.plans.append(plan)
        return replace(planned, plan=plan)

    with mock.patch.object(compile_loop, "plan_graph", plan_graph):
        yield found
