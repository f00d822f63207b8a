"""Gives the values of a graph the forms that the request allows and that are possible on the device, or says why none are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoremat.basics.checks import MOST_BYTES
from autoremat.basics.errors import OptionWarning
from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.capture.capture import Capture
from autoremat.capture.communication import replicated_nodes
from autoremat.capture.forms import with_forms
from autoremat.capture.pricing import ROOFLINE
from autoremat.measure.links import host_link_of
from autoremat.passes.forms import FORMS
from autoremat.planner.cost.links import HostLink, Links, assumed_host_link
from autoremat.planner.graph.forms import BITS, DEVICE, HOST, SHARDS
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.grouped_plan import GroupedPlan
from autoremat.planner.search.placement import place
from autoremat.planner.settings import SETTINGS
from autoremat.request.request import Request
from autoremat.torch_private import compilers, joint_graphs
from autoremat.torch_private.autograd import retraces_backwards


def with_allowed_forms(
    captured: Capture, request: Request, card: str | None, link: HostLink | None = None, gathers: Links | None = None
) -> tuple[Capture, tuple[str, ...]]:
    """Returns ``captured`` with the forms of its values. For each form asked for that none has, returns option and reason.

    ``card`` is the CUDA device by name that is planned for, if one is named. ``link`` has the rates that hold for all ranks.
    ``gathers`` are the links between the ranks; None if they may follow different plans.
    """
    possible = request.forms & FORMS.keys()
    if not possible:
        return captured, ()
    now("listing the forms of saved tensors")
    if setting := refused_setting(captured):
        does = {HOST: "copy to the host", BITS: "pack", SHARDS: "gather saved tensors"}
        return captured, _unused(captured, request, {name: f"the code cannot {does[name]} under {setting}" for name in does})
    why = dict[str, str]()
    if HOST in possible:
        device = joint_graphs.device_of(captured.joint)
        link = link or (assumed_host_link(card) if card else host_link_of(device, request.options.cost_model != ROOFLINE))
        if link is None:
            why[HOST] = f"{captured.device.name} has no memory apart from the host's, so a copy would free none"
    if SHARDS in possible and gathers is None:
        why[SHARDS] = "its ranks plan apart, and only those that follow one plan can gather together"
    replicated = replicated_nodes(captured.joint.graph) if SHARDS in possible else {}
    captured = with_forms(captured, possible, link, replicated, gathers)
    return captured, _unused(captured, request, why)


def _unused(captured: Capture, request: Request, why: dict[str, str]) -> tuple[str, ...]:
    """Returns the options whose forms no value of the graph has, each with the reason ``why``, or with the usual one."""
    least, found = format_bytes(SETTINGS.forms.minimum_bytes), {form.name for v in captured.graph.values for form in v.forms}
    store = request.options.store or ()
    options = {HOST: "host_memory"} | {name: f"store={name!r}" for name in (BITS, SHARDS) if name in store}
    usual = {
        HOST: f"no result of the forward that could be kept there has at least {least}",
        BITS: f"no result of the forward that could be packed is a mask of at least {least}",
        SHARDS: f"no result of the forward of at least {least} is known to be equal on all ranks of a group and divides among "
        "them: results of an all-reduce are, and what follows from these alone, element by element",
    }
    unused = [name for name in options if name in request.forms and name not in found]
    return tuple(f"{options[name]} has no effect on a graph: {why.get(name, usual[name])}" for name in unused)


def host_remedy(captured: Capture, smallest: Plan, request: Request, card: str | None, limit: int) -> str:
    """Returns the advice to keep saved tensors on the host, if ``smallest`` then has a peak of ``limit`` bytes; else "".

    The link counts at its assumed rate, because an error must not wait for a measurement.
    """
    limits = request.limits
    if limits.host_bytes is not None or limits.step_share is not None or HOST not in (request.options.store or (HOST,)):
        return ""
    options = replace(request.options, host_memory=MOST_BYTES, store=(DEVICE, HOST), save=(), cost_model=ROOFLINE)
    asked = replace(request, limits=replace(limits, host_bytes=MOST_BYTES), options=options)
    with_host, unused = with_allowed_forms(captured, asked, card)
    if unused:
        return ""
    plan = Plan.of(replace(smallest.graph, values=with_host.graph.values), smallest.schedule)
    placed = place(GroupedPlan(plan), limit)
    held = 0 if placed is None else placed.host_bytes
    if not held:
        return ""
    return f"set host_memory to {held} ({format_bytes(held)}): a plan fits that keeps these on the host"


def refused_setting(captured: Capture) -> str:
    """Returns the present setting of Inductor under which code of the graph cannot carry out stays; empty if it can."""
    if retraces_backwards():
        return "compiled autograd (torch._dynamo.config.compiled_autograd)"
    if not captured.graph.machine.fuses:
        return ""
    if captured.runs_on == "cuda" and compilers.records_cuda_graphs():
        return 'CUDA graphs (mode="reduce-overhead", triton.cudagraphs)'
    return "a wrapper in C++ (cpp_wrapper)" if compilers.writes_wrapper_in_cpp() else ""


def warn_of_unused_forms(unused: Sequence[str]) -> None:
    """Warns with ``OptionWarning`` of each option in ``unused``, which states the reason why it has no effect."""
    for text in unused:
        warn_user(text, OptionWarning)
