"""The entry point of ``torch.compile(model, backend="autoremat")``: turns a graph and options into a compiled callable."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from autoremat.agreement.joining import membership
from autoremat.basics.checks import options_of, underscored
from autoremat.basics.errors import (
    BudgetInfeasible,
    BudgetWarning,
    FallbackWarning,
    OptionsError,
    fallback_message,
    find_cause,
    is_user_error,
    planning_error,
    unwrapped,
)
from autoremat.basics.progress import now, status_if_slow
from autoremat.capture import source_info
from autoremat.capture.capture import device_of_inputs, may_train
from autoremat.capture.communication import may_communicate
from autoremat.compiler import records
from autoremat.compiler.absent_backward import warn_without_backward
from autoremat.compiler.blocks import compiled_for_blocks, current_block
from autoremat.compiler.breaks import as_part, listen, note_on, one_of_several, seconds_in_dynamo, until_reset, what_dynamo_said
from autoremat.compiler.buckets import sharing_one_budget
from autoremat.compiler.cache_key import graph_key
from autoremat.compiler.compile_loop import compile_graph, with_bytes
from autoremat.compiler.counting import warn_without_effect
from autoremat.compiler.dynamic_shapes import with_limits
from autoremat.compiler.grants import note_grant, with_grant
from autoremat.compiler.interception import active_interceptor
from autoremat.compiler.joint_graph import PlanningContext
from autoremat.compiler.lowering import Compiled, GraphSource
from autoremat.compiler.partitioner import Partitioner
from autoremat.compiler.partitioning import Partitioning
from autoremat.compiler.peers import joined
from autoremat.compiler.pipeline_stage import with_open_calls
from autoremat.compiler.publishing import published
from autoremat.options.defaults import note_compiled
from autoremat.options.options import PLANNING_KEYS, Options
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.ledger import Share
from autoremat.planner.multigraph.step_profile import Budget, StepProfile
from autoremat.report.registry import explain_absence_by, note_graph
from autoremat.report.report import Report
from autoremat.torch_private import compilers
from autoremat.torch_private.dynamo import copied_with_sources, passed_bytes, sharded_inputs

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
    note_compiled(parsed, options, PLANNING_KEYS, until_reset())
    if "custom_partitioner_fn" in dict(parsed.inductor):
        raise OptionsError("custom_partitioner_fn cannot be combined with this backend, which is a partitioner itself")
    title, waited = f"compiling {source_info.begin_of(gm.graph)}", seconds_in_dynamo()
    try:
        with status_if_slow(title, shown=parsed.progress, waited=waited), one_of_several(gm):
            if active_interceptor() is None:
                warn_without_backward(gm, parsed, is_explicit="memory_budget" in underscored(options_of(options)))
            return _compile(gm, example_inputs, parsed)
    except Exception as error:
        said = unwrapped(error)
        if not isinstance(said, BudgetInfeasible | OptionsError):
            raise
        log.debug("the error in full", exc_info=error)
        raise said.with_traceback(None) from None  # its text says all, so neither its way here nor what wraps it is shown


listen()
membership()  # other ranks see from now on whether this process lives, although its first graph comes later
explain_absence_by(what_dynamo_said)


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], parsed: Options) -> Compiled:
    """Returns the compiled graph, or the callable of an active interceptor."""
    source_info.take_names(gm)
    patches = {**compilers.mode_config(parsed.mode), **dict(parsed.inductor)}
    interceptor = active_interceptor()
    if interceptor is not None and may_train(gm, example_inputs):
        return interceptor.compile(gm, example_inputs, patches)
    budget_of = _budgets(gm, example_inputs, parsed)
    if isinstance(parsed.memory_budget, StepProfile):
        parsed = dataclasses.replace(parsed, device_ledger=parsed.memory_budget.device_ledger)

    def compile_with(budget: Budget) -> Compiled:
        module = copied_with_sources(gm) if len(budget_of) > 1 else gm  # the compiler takes ownership
        own = _with_device_bytes(module, example_inputs, dataclasses.replace(parsed, memory_budget=budget))
        with sharing_one_budget(module, example_inputs, own, patches) as options, _advised(budget):
            return _compile_alone(module, example_inputs, options, patches)

    return compiled_for_blocks(budget_of, compile_with)


def _compile_alone(gm: fx.GraphModule, example_inputs: Sequence[Any], parsed: Options, patches: dict[str, Any]) -> Compiled:
    """Returns the compiled graph under its own budget or its share of a step's."""
    if not may_train(gm, example_inputs):
        return _compile_planned(gm, example_inputs, parsed, patches)
    device = device_of_inputs(gm, example_inputs)
    warn_without_effect(parsed, device.type)
    parsed = with_grant(as_part(with_open_calls(with_bytes(parsed, device))), example_inputs)

    def compile_with(options: Options) -> Compiled:
        return _compile_planned(gm, example_inputs, options, patches)

    return with_limits(compile_with, example_inputs, parsed, lambda error: find_cause(error, BudgetInfeasible) is not None)


def _compile_planned(gm: fx.GraphModule, example_inputs: Sequence[Any], parsed: Options, patches: dict[str, Any]) -> Compiled:
    """Returns the graph compiled with a plan, or by plain Inductor if it does not train or planning falls back."""
    if parsed.compiler == "aot_eager":
        return _compile_uncompiled(gm, example_inputs, parsed)
    if not may_train(gm, example_inputs):
        return compilers.compile_with_inductor(gm, example_inputs, patches, {})
    try:
        with joined(parsed, source_info.begin_of(gm.graph), may_communicate(gm)) as peers:
            found = compile_graph(GraphSource(gm, example_inputs, patches), parsed, peers)
        if found.record is not None:
            records.save(found.key, found.record)
        return _published(gm, found.function, found.report, parsed, example_inputs)
    except Exception as error:  # an error of the graph itself recurs in plain Inductor below
        if is_user_error(error):
            raise
        if not parsed.falls_back:
            raise planning_error(error, source_info.place_of(gm.graph)) from error
        log.info("compiling a plan failed", exc_info=error)
        compiled = compilers.compile_with_inductor(gm, example_inputs, patches, {})
        warnings.warn(fallback_message(error, source_info.place_of(gm.graph)), FallbackWarning, stacklevel=2)
        return compiled


def _budgets(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Mapping[int | None, Budget]:
    """Returns the budget of each block that calls the graph: its share in place of a step profile.

    The block None stands for all other calls.
    """
    profile = options.memory_budget
    if not isinstance(profile, StepProfile) or not may_train(gm, inputs):
        return {None: options.memory_budget}
    key = graph_key(gm, inputs)
    shares = profile.shares_of(key) or profile.shares_of_block(current_block())
    if not shares and key not in profile.step.others:
        warnings.warn(
            "a graph is compiled that the profiled step did not have, under the whole budget of the step: the peaks of this "
            "graph and of others can add up. Profile the function that is compiled, with inputs of these shapes",
            BudgetWarning,
            stacklevel=2,
        )
    return shares or {None: profile.budget_bytes}


@contextlib.contextmanager
def _advised(budget: Budget) -> Iterator[None]:
    """Adds advice to a ``BudgetInfeasible`` of the body if the budget is a share of the profile of blocks."""
    try:
        yield
    except Exception as error:
        infeasible = find_cause(error, BudgetInfeasible)
        if infeasible is not None and isinstance(budget, Share) and current_block() is not None:
            infeasible.advise(
                "the figures are those of one block in its share of the step's budget, and generated code may need more than "
                "its plan: raise the budget of the step. For larger inputs than in the profiled step, call profile_again() on "
                "the result of compile_blocks"
            )
        raise


def _with_device_bytes(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Options:
    """Returns ``options`` with the bytes that a device budget leaves for the graph in place of it."""
    if not isinstance(options.memory_budget, DeviceBudget) or not may_train(gm, inputs):
        return options
    given = passed_bytes(gm, inputs, device_of_inputs(gm, inputs))
    return options.on_device(given, with_open_calls(options).open_calls.accumulates)


def _compile_uncompiled(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Compiled:
    """Returns a callable that runs the halves of the planned graph as FX graphs, without generated code."""
    now("tracing")
    place = source_info.begin_of(gm.graph) if may_train(gm, inputs) else None
    with joined(options, place, may_communicate(gm)) as peers:
        agreed = peers.agree(options, device_of_inputs(gm, inputs))
        context = PlanningContext(
            agreed.options,
            rates=agreed.rates,
            may_repeat_collectives=peers.may_repeat_collectives,
            sharded_inputs=sharded_inputs(gm),
        )
        is_settled = False
        while not is_settled:
            partitioning = Partitioning(context, peers.plan, peers.fail)
            compiled = compilers.compile_uncompiled(gm, inputs, Partitioner(partitioning))
            is_settled = peers.settled()
    return _published(gm, compiled, partitioning.report, options, inputs)


def _published(
    gm: fx.GraphModule, compiled: Compiled, report: Report | None, options: Options, inputs: Sequence[Any]
) -> Compiled:
    """Returns ``compiled`` with its report published, and notes what its function is granted."""
    if report is not None:
        note_grant(options, inputs, report.budget_bytes)
    return published(compiled, report, options, note_on(gm))
