"""Resolves budgets: from the options and the surroundings of a graph to its request.

Every front door asks it, and nothing behind it sees a budget as users write it. A new kind of budget has a ``case`` here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autoremat.basics.checks import FORMS_ANYWHERE
from autoremat.basics.errors import BudgetWarning, OptionsError, OptionWarning
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.capture.source_info import beside_the_loss
from autoremat.measure.calibration import share_of_host_memory
from autoremat.options.options import Options
from autoremat.planner.cost.datasheets import device_memory
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.ledger import OpenCalls
from autoremat.planner.multigraph.step_profile import StepProfile
from autoremat.planner.plans.limits import Share
from autoremat.request.request import AS_A_STEP, Request, RequestedLimits
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private.dynamo import in_few_words, resets

ADVICE_FOR_A_BLOCK = (
    "the figures are those of one block in its share of the step's budget, and generated code may need more than its plan: "
    "raise the budget of the step. For larger inputs than in the profiled step, call profile_again() on the result of "
    "compile_blocks"
)


def requests_of(options: Options, around: Surroundings) -> Mapping[int | None, Request]:
    """Returns the request of a graph for each block that calls it. The block None stands for all other calls.

    Equal requests are one object. Warns with ``BudgetWarning`` if a profiled step did not have the graph. Raises
    ``OptionsError`` if free memory is asked for and there is none, and ``DeviceTooSmall`` if nothing is left of a device.
    """
    profile = options.memory_budget
    if not isinstance(profile, StepProfile):
        return {None: request_of(options, around)}
    shares = profile.shares_of(around.key) or profile.shares_of_block(around.block)
    if not shares:
        if around.key not in profile.step.others:
            warn_user(
                "a graph is compiled that the profiled step did not have, under the whole budget of the step: the peaks of "
                "this graph and of others can add up. Profile the function that is compiled, with inputs of these shapes",
                BudgetWarning,
            )
        return {None: _in_profile(profile, profile.budget_bytes, options, around)}
    if set(shares.values()) - {None}:
        if options.open_calls != OpenCalls():
            warn_of_open_calls()
        if profile.step.host_bytes is None and options.host_memory is not None:
            warn_user(
                "host_memory has no effect under a step profile without it: pass it to profile_step, in `options`",
                OptionWarning,
            )
    advice = () if around.block is None else (ADVICE_FOR_A_BLOCK,)
    found = {
        share: _in_profile(profile, None, options, around) if share is None  # of a profile without a budget
        else request_of_share(share, profile, options, advice)
        for share in dict.fromkeys(shares.values())
    }  # fmt: skip
    return {block: found[share] for block, share in shares.items()}


def request_of(options: Options, around: Surroundings) -> Request:
    """Returns the request of a graph, or of a step of several graphs, under a budget of its own."""
    calls = options.open_calls
    limits = _limits_of(options, around, calls)
    if around.why_broken is None:
        request = Request.of(options, limits, calls)
        if around.module is None:
            return request
        returned, returned_bytes = beside_the_loss(around.module)
        return replace(request, returned=returned, returned_bytes=returned_bytes)
    why = f" ({in_few_words(around.why_broken).partition('. ')[0]})" if around.why_broken else ""
    advice = (
        f"this is one graph of several, for Dynamo broke the function{why}: take that line out, or share one budget among "
        "them, by autoremat.profile_step(function, *inputs, memory_budget=...)"
    )
    request = Request.of(options, replace(limits, advice=(advice,)), calls)
    return request if limits.reference_share is None else replace(request, on_infeasible=AS_A_STEP)


def request_of_recording(options: Options) -> Request:
    """Returns the request of a graph whose step is measured. Its plan has the minimum peak, whatever the budget.

    A budget is shared out later. Until then it counts as some bound: constraints need not be the whole plan, and a graph that
    cannot be planned is an error. Raises ``OptionsError`` for limits that a step cannot share out.
    """
    share = None if options.memory_budget is None else 1.0
    limits = RequestedLimits(reference_share=share, max_slowdown=options.max_slowdown, host_bytes=_host_bytes(options))
    limits.refuse_beside_peak("a step profile")
    return Request.of(options, limits, OpenCalls())


def _limits_of(options: Options, around: Surroundings, calls: OpenCalls) -> RequestedLimits:
    limits = RequestedLimits(max_slowdown=options.max_slowdown, host_bytes=_host_bytes(options))
    match options.memory_budget:
        case DeviceBudget() as device:
            ledger = device.of_graph(around.given_bytes, calls.accumulates)
            return _limits_on_device(limits, ledger, options)
        case "auto":
            free = _free_bytes(options, around)
            if not around.optimizer_rows:
                return replace(limits, peak_bytes=free - options.auto_headroom)
            name = f"memory that is free on {around.device}"
            device = DeviceBudget(free, around.optimizer_rows, options.auto_headroom, name)
            return _limits_on_device(limits, device.of_graph(0, calls.accumulates), options)
        case float() as share:
            granted = granted_bytes(around.function, share, options.compiler, around.parameters)
            return replace(limits, reference_share=share, granted_bytes=granted)
        case int() as number:
            return replace(limits, peak_bytes=number)
        case None:
            return limits
    raise AssertionError(f"{options.memory_budget!r} is resolved for each graph by itself")


def _host_bytes(options: Options) -> int | None:
    """Returns the bound on the bytes on the host; None to keep nothing there."""
    return share_of_host_memory() if options.host_memory == "auto" else cast("int | None", options.host_memory)


def _limits_on_device(limits: RequestedLimits, ledger: DeviceBudget, options: Options) -> RequestedLimits:
    """Returns ``limits`` with the bytes that the ledger of a device leaves.

    Raises ``DeviceTooSmall`` if the ledger alone exceeds the device, or warns of it if the best effort is asked for.
    """
    if options.on_infeasible != "best_effort":
        ledger.check()
    elif not ledger.fits(1):
        needed = format_bytes(ledger.device_bytes(1) + ledger.reserve_bytes)
        warn_user(
            f"the ledger of the device needs {needed} of {format_bytes(ledger.total_bytes)}, whatever is recomputed: "
            f"{ledger.advice(ledger.binding(1))}",
            BudgetWarning,
        )
    return replace(limits, peak_bytes=max(1, ledger.budget_bytes), ledger=ledger)


def _free_bytes(options: Options, around: Surroundings) -> int:
    """Returns the free bytes of the device. Raises ``OptionsError`` if there is no device, or nothing free on it."""
    free, headroom = around.free_bytes_of(around.device), options.auto_headroom
    if free is None:
        raise OptionsError(
            f'memory_budget="auto" needs a CUDA device, and the model is on none. Accepted elsewhere: {FORMS_ANYWHERE}'
        )
    if free <= headroom:
        raise OptionsError(
            f'memory_budget="auto" leaves nothing: {format_bytes(free)} ({free} bytes) are free on the device, and '
            f"auto_headroom={headroom} ({format_bytes(headroom)}) is to stay free. "
            "Free device memory, lower `auto_headroom`, or give the budget in bytes."
        )
    return free


def request_of_share(share: Share, profile: StepProfile, options: Options, advice: tuple[str, ...]) -> Request:
    """Returns the request of a graph with a share in a step's budget."""
    host, ledger = profile.step.host_bytes, profile.device_ledger
    limits = RequestedLimits(share.peak_bytes, step_share=share, host_bytes=host, ledger=ledger, advice=advice)
    if not (profile.must_fit or options.on_infeasible):
        options = replace(options, on_infeasible="best_effort")
    return Request.of(options, limits, OpenCalls())


def _in_profile(profile: StepProfile, budget: int | None, options: Options, around: Surroundings) -> Request:
    request = request_of(replace(options, memory_budget=budget), around)
    return replace(request, limits=replace(request.limits, ledger=profile.device_ledger))


def refuse_open_calls(options: Options, who: str, *names: str) -> None:
    """Raises ``OptionsError`` for the options ``names`` on open calls, which ``who`` measures."""
    if any(getattr(options, name) is not None for name in names):
        raise OptionsError(f"{who} counts the calls that are open at once itself: leave out {' and '.join(names)}")


def warn_of_open_calls() -> None:
    """Warns that the options on open calls have no effect on graphs that share a step's budget."""
    warn_user(
        "in_flight and accumulate have no effect under a profiled step, whose profile counts open calls and gradients itself",
        OptionWarning,
    )


# -- questions about a budget that is not resolved yet -----------------------------------------------------------------


def is_profile(options: Options) -> bool:
    """Returns True if the budget is a step profile."""
    return isinstance(options.memory_budget, StepProfile)


def card_of(options: Options) -> str | None:
    """Returns the card by name whose memory a device budget divides; None if there is none."""
    budget = options.memory_budget
    if not isinstance(budget, DeviceBudget) or device_memory(budget.device) is None:
        return None
    return budget.device


def refuse_step_profiles(options: Options) -> None:
    """Raises ``OptionsError`` if the budget is a step profile."""
    if is_profile(options):
        raise OptionsError(
            "memory_budget: a step profile shares its budget out among the graphs that are compiled; here each graph is "
            "planned by itself. Accepted here: bytes, a share or None; printing the profile shows the whole step"
        )


# -- bytes granted to earlier graphs of a function ---------------------------------------------------------------------------


Grants = dict[tuple[int, int | None, float, str], int]
"""The most bytes granted, by the number of resets of torch, Dynamo's number of a function, the share and the compiler."""

_of_parameter = WeakTensorKeyDictionary()
_without_parameters: Grants = {}


def _all_of(parameters: Sequence[torch.nn.Parameter]) -> list[Grants]:
    for parameter in parameters:
        if parameter not in _of_parameter:
            _of_parameter[parameter] = {}
    return [_of_parameter[parameter] for parameter in parameters] or [_without_parameters]


def granted_bytes(function: int | None, share: float, compiler: str, parameters: Sequence[torch.nn.Parameter]) -> int:
    """Returns the bytes that an earlier graph of ``function`` was granted under the same share; 0 if there is none."""
    return max(grants.get((resets(), function, share, compiler), 0) for grants in _all_of(parameters))


def note_grant(request: Request, around: Surroundings, budget_bytes: int | None) -> None:
    """Notes the bytes that the present graph is granted, for later graphs of its function."""
    share, compiler = request.limits.reference_share, request.options.compiler
    if share is None or around.function is None or budget_bytes is None:
        return
    most = max(budget_bytes, granted_bytes(around.function, share, compiler, around.parameters))
    for grants in _all_of(around.parameters):
        grants[resets(), around.function, share, compiler] = most
