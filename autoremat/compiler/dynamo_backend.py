"""The entry point of ``torch.compile(model, backend="autoremat")``: turns a graph and options into a compiled callable."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from autoremat.basics.checks import options_of, underscored
from autoremat.basics.errors import (
    BudgetInfeasible,
    FallbackWarning,
    OptionsError,
    OptionWarning,
    fallback_message,
    find_cause,
    is_user_error,
    planning_error,
    unwrapped,
)
from autoremat.basics.progress import status_if_slow
from autoremat.basics.warn import warn_user
from autoremat.capture import source_info
from autoremat.capture.capture import may_train
from autoremat.capture.communication import may_communicate
from autoremat.compiler.breaks import listen, note_on, seconds_in_dynamo, warn_of_rnn, what_dynamo_said
from autoremat.compiler.compile_loop import compile_graph
from autoremat.compiler.dynamic_shapes import sizes_to_plan_for
from autoremat.compiler.early_gradients import checked, compiled_in_parts
from autoremat.compiler.lowering import Compiled
from autoremat.compiler.peers import joined
from autoremat.compiler.problem import Problem, save_record
from autoremat.compiler.publishing import EVALUATION, published
from autoremat.compiler.split_budget import request_in_split
from autoremat.options.options import Options, note_compiled
from autoremat.report.registry import explain_absence_by, note_graph
from autoremat.request.budgets import is_profile, note_grant, requests_of
from autoremat.request.surroundings import Surroundings, current_block, current_receiver
from autoremat.torch_private import compilers, dynamo, frames, joint_graphs, split_graphs
from autoremat.torch_private.dynamo import asks_to_restart, copied_with_sources, resets
from autoremat.torch_private.symbolic_sizes import planned_for

log = logging.getLogger("autoremat")

_trained: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters of graphs with a backward. Further graphs that read one, and have no backward, serve for evaluation."""


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Returns a callable that computes a graph captured by Dynamo and keeps its training step within a memory budget.

    ``options`` and ``mode`` are those of ``torch.compile``; :class:`autoremat.Options` documents the options of this package. A
    budget is in bytes, or a share of the peak that the step needs without autoremat.

    Raises ``OptionsError`` for unknown options and ``BudgetInfeasible`` if no plan fits. Raises ``PlanningError`` if planning
    fails and no fallback is allowed; with a fallback it warns with ``FallbackWarning``.
    """
    parsed = Options.parse(options, mode, compilers.inductor_config_names)
    note_graph()
    listen()
    reset = resets()
    note_compiled(parsed, options, lambda: resets() == reset)
    if "custom_partitioner_fn" in dict(parsed.inductor):
        raise OptionsError("custom_partitioner_fn cannot be combined with this backend, which is a partitioner itself")
    title, waited = f"compiling {source_info.begin_of(gm.graph)}", seconds_in_dynamo()
    is_explicit = "memory_budget" in underscored(options_of(options))
    try:
        with status_if_slow(title, shown=parsed.progress, waited=waited):
            return _compile(gm, example_inputs, parsed, is_explicit)
    except Exception as error:
        said = unwrapped(error)
        if not isinstance(said, BudgetInfeasible | OptionsError):
            raise
        log.debug("the error in full", exc_info=error)
        raise said.with_traceback(None) from None  # its text says all, so neither its way here nor what wraps it is shown


listen()
explain_absence_by(what_dynamo_said)


def _compile(gm: fx.GraphModule, inputs: Sequence[Any], options: Options, is_explicit: bool) -> Compiled:
    """Returns a callable that computes the graph: in parts with a backward each, or for each block by the code for its request.

    A receiver of this thread makes it instead.
    """
    source_info.take_names(gm)
    receiver = current_receiver()
    if receiver is None:
        _warn_without_backward(gm, inputs, options, is_explicit)
        warn_of_rnn(gm, options.memory_budget)
    patches = compilers.asked_config(options)
    if not may_train(gm, inputs):
        if options.compiler == "aot_eager":
            return compilers.compile_uncompiled(gm, inputs, joint_graphs.partition_as_torch_does)
        return compilers.compile_with_inductor(gm, inputs, patches)
    if receiver is not None:
        return receiver(gm, inputs, patches)
    around = Surroundings.of(gm, inputs)
    if options.compiler == "inductor" and around.device.type == "cpu":
        compilers.require_cpp_compiler(patches)  # an error before anything is measured and planned
    whole = replace(options, early_gradients=False, hooks_free_gradients=False)
    try:
        compiled = compiled_in_parts(
            gm, inputs, options, around, patches, lambda part, given: _compile(part, given, whole, is_explicit)
        )
        if compiled is None:
            codes: dict[int, Compiled] = {}
            requests = requests_of(options, around)
            different = {id(request): request for request in requests.values()}
            for number, request in different.items():
                module = copied_with_sources(gm) if len(different) > 1 else gm  # the compiler takes ownership
                codes[number] = _compile_request(Problem(request, module, inputs, patches), around)
            code_of = {block: codes[id(request)] for block, request in requests.items()}
            first = next(iter(code_of.values()))
            compiled = first if len(codes) == 1 else lambda *args: code_of.get(current_block(), first)(*args)
    except Exception as error:
        if find_cause(error, BudgetInfeasible) is None or options.on_infeasible or not around.evaluates:
            raise
        return _compile(gm, inputs, replace(options, on_infeasible="best_effort"), is_explicit)
    return checked(compiled, inputs, options)


def _compile_request(problem: Problem, around: Surroundings) -> Compiled:
    """Returns the graph compiled with a plan that holds up to the largest sizes for which one fits. Dynamo then guards them."""
    gm, split = problem.module, request_in_split(problem, around)
    assert gm is not None
    request = split.request
    begin = source_info.begin_of(gm.graph)
    *larger, present = sizes_to_plan_for(problem.inputs, request.limits)
    for sizes in (*larger, present):
        must_fit = sizes is not present
        asked = replace(request, on_infeasible="raise") if must_fit else request
        try:
            with planned_for(sizes), joined(problem, begin, may_communicate(gm)) as peers:
                found = compile_graph(replace(problem, request=asked), peers)
            for size, limit in sizes.items():
                size.guard_at_most(limit)
            if found.record is not None:
                save_record(found.key, found.record)
            if found.report is not None:
                note_grant(request, around, found.report.budget_bytes)
            evaluates = not request.must_fit and request.limits.peak_bytes is not None and around.evaluates
            # A profile measures the code between graphs, so that the breaks of its graphs hide nothing.
            note = note_on(gm) if request.limits.step_share is None else split.note
            return published(found.function, found.report, request, note, EVALUATION if evaluates else "")
        except Exception as error:
            if must_fit and find_cause(error, BudgetInfeasible) is not None:
                continue
            split.restate(error)
            if is_user_error(error) or asks_to_restart(error) or compilers.lacks_cpp_compiler(error) or not request.fuses:
                raise
            if not request.falls_back:
                raise planning_error(error, source_info.place_of(gm.graph)) from error
            log.info("compiling a plan failed", exc_info=error)
            # An error of the graph itself recurs here.
            compiled = compilers.compile_with_inductor(gm, problem.inputs, dict(problem.patches))
            warn_user(fallback_message(error, source_info.place_of(gm.graph)), FallbackWarning)
            return compiled
    raise AssertionError("the present sizes are the last ones")


# -- graphs without a backward ---------------------------------------------------------------------------------------------


def _warn_without_backward(gm: fx.GraphModule, inputs: Sequence[Any], options: Options, is_explicit: bool) -> None:
    """Warns with ``OptionWarning`` if the budget has no effect on a graph that Dynamo captured.

    ``is_explicit`` is True if ``torch.compile`` got the budget itself, and no default of the process.
    """
    read = [tensor for tensor in inputs if isinstance(tensor, torch.nn.Parameter)]
    if dynamo.requires_gradient(gm):
        _trained.update(dict.fromkeys(read, True))
        return
    if options.memory_budget is None or is_profile(options):
        return
    reason = _why_absent(gm, is_explicit and not any(tensor in _trained for tensor in read))
    if reason:
        place = source_info.begin_of(gm.graph)
        warn_user(f"memory_budget has no effect on {place}: {reason}", OptionWarning)


def _why_absent(gm: fx.GraphModule, is_meant_to_train: bool) -> str:
    """Returns the reason why the graph has no backward; empty for evaluation, and for a part of a function."""
    if dynamo.computes_gradients(gm):
        return (
            "it computes gradients itself, by torch.func.grad, vjp or torch.autograd.grad, so torch hands over forward and "
            "backward as one graph, which keeps what it needs. Return a loss, of gradients or not, and call backward() on it"
        )
    is_broken = bool(frames.reasons.behind()) or dynamo.graph_break_around(gm) is not None or split_graphs.is_split()
    if not torch.is_grad_enabled() or is_broken or not is_meant_to_train:
        return ""
    return (
        "it has no backward, because no parameter or input requires a gradient, or nothing is returned that depends on one. "
        "Let one require a gradient, or evaluate under torch.no_grad()"
    )
