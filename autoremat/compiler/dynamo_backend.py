"""The entry point of ``torch.compile(model, backend="autoremat")``: turns a graph and options into a compiled callable."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autoremat.basics.checks import options_of, underscored
from autoremat.basics.errors import (
    BudgetInfeasible,
    FallbackWarning,
    OptionsError,
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
from autoremat.compiler import records
from autoremat.compiler.absent_backward import warn_without_backward
from autoremat.compiler.breaks import listen, note_on, seconds_in_dynamo, warn_of_rnn, what_dynamo_said
from autoremat.compiler.compile_loop import compile_graph, compile_uncompiled
from autoremat.compiler.dynamic_shapes import Sizes, sizes_to_plan_for
from autoremat.compiler.early_gradients import checked, compiled_in_parts
from autoremat.compiler.interception import active_interceptor
from autoremat.compiler.lowering import Compiled, GraphSource
from autoremat.compiler.peers import joined
from autoremat.compiler.publishing import EVALUATION, published
from autoremat.compiler.split_budget import request_in_split
from autoremat.options.options import Options, note_compiled
from autoremat.report.registry import explain_absence_by, note_graph
from autoremat.request.budgets import requests_of
from autoremat.request.grants import note_grant
from autoremat.request.request import Request
from autoremat.request.surroundings import Surroundings, current_block
from autoremat.torch_private import compilers, joint_graphs
from autoremat.torch_private.dynamo import asks_to_restart, copied_with_sources, until_reset
from autoremat.torch_private.symbolic_sizes import planned_for

log = logging.getLogger("autoremat")


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
    note_compiled(parsed, options, until_reset())
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
    """Returns a callable that computes the graph, as a whole or in parts. An active interceptor makes it instead."""
    source_info.take_names(gm)
    patches = compilers.asked_config(options)
    interceptor = active_interceptor()
    if interceptor is None:
        warn_without_backward(gm, inputs, options, is_explicit)
        warn_of_rnn(gm, options.memory_budget)
    if not may_train(gm, inputs):
        if options.compiler == "aot_eager":
            return compilers.compile_uncompiled(gm, inputs, joint_graphs.partition_as_torch_does)
        return compilers.compile_with_inductor(gm, inputs, patches, {})
    if interceptor is not None:
        return interceptor.compile(gm, inputs, patches)
    around = Surroundings.of(gm, inputs)
    if options.compiler == "inductor" and around.device.type == "cpu":
        compilers.require_cpp_compiler(patches)  # an error before anything is measured and planned
    try:
        compiled = _compile_in_parts_or_whole(gm, inputs, options, around, patches, is_explicit)
    except Exception as error:
        if find_cause(error, BudgetInfeasible) is None or options.on_infeasible or not around.evaluates:
            raise
        settled = replace(options, on_infeasible="best_effort")
        compiled = _compile_in_parts_or_whole(gm, inputs, settled, around, patches, is_explicit)
    return checked(compiled, inputs, options)


def _compile_in_parts_or_whole(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    around: Surroundings,
    patches: Mapping[str, Any],
    is_explicit: bool,
) -> Compiled:
    """Returns a callable that computes the graph, in parts with a backward each if hooks on gradients ask for them."""
    whole = replace(options, early_gradients=False, hooks_free_gradients=False)
    compiled = compiled_in_parts(
        gm, inputs, options, around, patches, lambda part, given: _compile(part, given, whole, is_explicit)
    )
    if compiled is None:
        compiled = _compile_whole(GraphSource(gm, inputs, patches), options, around)
    return compiled


def _compile_whole(source: GraphSource, options: Options, around: Surroundings) -> Compiled:
    """Returns a callable that computes the graph: for each block that calls it, by the code for its request."""
    requests = requests_of(options, around)
    different = {id(request): request for request in requests.values()}
    codes: dict[int, Compiled] = {}
    for number, request in different.items():
        module = copied_with_sources(source.module) if len(different) > 1 else source.module  # the compiler takes ownership
        codes[number] = _compile_request(replace(source, module=module), request, around)
    code_of = {block: codes[id(request)] for block, request in requests.items()}
    first = next(iter(code_of.values()))
    return first if len(codes) == 1 else lambda *args: code_of.get(current_block(), first)(*args)


def _compile_request(source: GraphSource, request: Request, around: Surroundings) -> Compiled:
    """Returns the graph compiled for the largest sizes whose plan fits, which Dynamo then guards."""
    request = request_in_split(source, request, around)
    *larger, present = sizes_to_plan_for(source.inputs, request.limits)
    for sizes in larger:
        try:
            return _compile_for(sizes, source, request, around, must_fit=True)
        except Exception as error:
            if find_cause(error, BudgetInfeasible) is None:
                raise
    return _compile_for(present, source, request, around)


def _compile_for(sizes: Sizes, source: GraphSource, request: Request, around: Surroundings, must_fit: bool = False) -> Compiled:
    """Returns the graph compiled with a plan that holds up to ``sizes``, or by plain Inductor if planning falls back."""
    gm = source.module
    asked = replace(request, on_infeasible="raise") if must_fit else request
    compile_with = compile_graph if request.fuses else compile_uncompiled
    try:
        begin = source_info.begin_of(gm.graph)
        with planned_for(sizes), joined(asked, begin, may_communicate(gm)) as peers:
            found = compile_with(source, asked, peers)
        for size, limit in sizes.items():
            size.guard_at_most(limit)
        if found.record is not None:
            records.save(found.key, found.record)
        if found.report is not None:
            note_grant(request, around, found.report.budget_bytes)
        evaluates = not request.must_fit and request.limits.peak_bytes is not None and around.evaluates
        return published(found.function, found.report, request, note_on(gm), EVALUATION if evaluates else "")
    except Exception as error:  # an error of the graph itself recurs in plain Inductor below
        if is_user_error(error) or asks_to_restart(error) or compilers.lacks_cpp_compiler(error) or not request.fuses:
            raise
        place = source_info.place_of(gm.graph)
        if not request.falls_back:
            raise planning_error(error, place) from error
        log.info("compiling a plan failed", exc_info=error)
        compiled = compilers.compile_with_inductor(gm, source.inputs, dict(source.patches), {})
        warn_user(fallback_message(error, place), FallbackWarning)
        return compiled
