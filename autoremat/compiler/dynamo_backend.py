"""The entry point of ``torch.compile(model, backend="autoremat")``: turns a graph and options into a compiled callable."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from autoremat import host_memory
from autoremat.basics.checks import options_of, underscored
from autoremat.basics.errors import (
    BudgetInfeasible,
    BudgetWarning,
    FallbackWarning,
    OptionsError,
    OptionWarning,
    TransferError,
    best_effort_message,
    fallback_message,
    find_cause,
    is_user_error,
    planning_error,
    unwrapped,
)
from autoremat.basics.progress import finish, status_if_slow
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.capture import source_info
from autoremat.capture.capture import device_of_inputs, may_train
from autoremat.capture.communication import may_communicate
from autoremat.compiler.breaks import BROKEN, listen, note_on, warn_of_rnn, what_dynamo_said
from autoremat.compiler.compile_loop import compile_graph
from autoremat.compiler.early_gradients import checked, compiled_in_parts
from autoremat.compiler.joint_graph import warn_of_unused_forms
from autoremat.compiler.lowering import Compiled
from autoremat.compiler.overlap_warning import watched
from autoremat.compiler.peers import joined
from autoremat.compiler.problem import Problem, save_record
from autoremat.compiler.split_budget import request_in_split
from autoremat.options.options import Options, note_compiled
from autoremat.report.registry import add_report, explain_absence_by, note_graph
from autoremat.report.report import Report
from autoremat.report.text_tables import PART
from autoremat.request.budgets import is_profile, note_grant, requests_of
from autoremat.request.request import AS_A_STEP, Request, RequestedLimits
from autoremat.request.surroundings import BLOCK, RECEIVER, Surroundings
from autoremat.torch_private import compilers, dynamo, frames, joint_graphs, split_graphs
from autoremat.torch_private.autograd import backward_node, retraces_backwards
from autoremat.torch_private.compilers import trace_artifact
from autoremat.torch_private.dynamo import asks_to_restart, copied_with_sources, resets
from autoremat.torch_private.fake_tensors import is_fake
from autoremat.torch_private.hooks import around_backward
from autoremat.torch_private.process_groups import infers_metadata
from autoremat.torch_private.symbolic_sizes import DynamicSize, dynamic_sizes, planned_for

log = logging.getLogger("autoremat")

EVALUATION = ". All modules with its parameters are in evaluation mode: torch.no_grad() around evaluation needs no backward"
"""What a warning of an infeasible budget adds in evaluation with gradients on."""

_given = set[str]()
"""Kinds of the hints that this process has logged."""

TORCHS = ("aten.", "prims.", "mkldnn.", "quantized.")
"""Beginnings of the names of torch's own ops, which nobody else declares."""

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
    is_explicit = "memory_budget" in underscored(options_of(options))
    try:
        with status_if_slow(f"compiling {source_info.begin_of(gm.graph)}", shown=parsed.progress):
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
    receiver = RECEIVER.get()
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
    around = Surroundings(device_of_inputs(gm, inputs), gm, inputs)
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
            compiled = first if len(codes) == 1 else lambda *args: code_of.get(BLOCK.get(), first)(*args)
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


def sizes_to_plan_for(inputs: Sequence[Any], limits: RequestedLimits) -> tuple[Mapping[DynamicSize, int], ...]:
    """Returns the sizes to try in turn: those up to a power of two, then the present ones. They are empty without a choice.

    The size of each tensor counts as its maximum over all sizes up to the limits. The remainder of a buffer behind a tensor
    shrinks as most tensors grow, and a plan that fits by this count fits at every such size. Dynamo recompiles for larger ones,
    about log2 n times for sizes that grow to n times the first one. A share of the reference peak is one at the sizes at hand.
    """
    is_share = limits.reference_share is not None and not limits.granted_bytes
    sizes = dynamic_sizes(inputs) if limits.bounds_peak and not is_share else []
    present = {size: size.hint for size in sizes}
    powers = {size: 1 << max(size.hint - 1, 0).bit_length() for size in sizes}
    largest = {size: power if size.most is None else max(size.hint, min(power, size.most)) for size, power in powers.items()}
    return (present,) if largest == present or limits.step_share is not None else (largest, present)


# -- the end of a compilation -----------------------------------------------------------------------------------------------


def published(compiled: Compiled, report: Report | None, request: Request, note: str = "", excuse: str = "") -> Compiled:
    """Registers and logs ``report``, with ``note`` if that is not empty, and returns ``compiled``.

    ``excuse`` ends the warning of a step over its budget.

    The returned callable compares its transfers with the plan. It is watched for other open calls if the graph has a budget of
    its own. Warns with ``BudgetWarning`` if the step exceeds the budget, or if compiled autograd traces its backward anew.
    """
    if report is None:
        return compiled
    more = (PART if request.on_infeasible == AS_A_STEP else "", note)
    # A record may have the ledger of another device.
    report = replace(report, device_ledger=request.limits.ledger, notes=(*report.notes, *filter(None, more)))
    _tell(report, request, excuse)
    trace_artifact("autoremat_report", report.to_json)
    add_report(report)
    if report.host_peak_bytes:
        host_memory.release()  # the buffers of a plan that this one replaces have other sizes
    if report.moved_bytes:
        compiled = TransferCheck(compiled, report.moved_bytes)
    if not request.limits.bounds_peak or request.limits.step_share is not None:
        return compiled
    return watched(compiled, report, request.limits.reference_share is not None)


def _tell(report: Report, request: Request, excuse: str) -> None:
    """Logs the report, and warns of what does not hold."""
    if report.unknown_workspaces and report.budget_bytes is not None:
        own = [name for name in report.unknown_workspaces if not name.startswith(TORCHS)]
        advice = [f"declare_pure(..., workspace_bytes=...) tells those of {', '.join(own)}"] if own else []
        if len(own) < len(report.unknown_workspaces):
            advice.append("lower memory_budget by what torch's own ops take, which track_peak measures")
        names = ", ".join(report.unknown_workspaces)
        log.warning("the budget may be exceeded by the workspaces of %s, which are not known: %s", names, "; ".join(advice))
    if not report.within_budget and report.budget_bytes is not None and request.on_infeasible != AS_A_STEP:
        message = best_effort_message(
            "the step", report.peak_bytes, report.budget_bytes, report.budget_share, report.reference_bytes or 0
        )
        warn_user(message + excuse, BudgetWarning)
    warn_of_unused_forms(report.unused_forms)
    if not report.keeps_time:
        warn_user(
            f"the step is predicted to take {report.slowdown:.1%} longer than without a budget, over its max_slowdown of "
            f"{report.max_slowdown:.1%}: no plan found within memory_budget ({format_bytes(report.budget_bytes or 0)}) is fast "
            f"enough, and within that time the minimum peak found is {format_bytes(report.timed_minimum_bytes or 0)}. "
            'on_infeasible="best_effort" runs the step anyway',
            BudgetWarning,
        )
    told = [(hint.partition(":")[0], hint) for hint in report.hints]
    told += [(BROKEN, note) for note in report.notes if note.startswith(BROKEN)]
    for kind, hint in told:
        if kind not in _given:
            _given.add(kind)
            log.warning("%s", hint)
    finish(report.summary())
    log.info("%s", report.summary())
    if report.budget_bytes is not None and retraces_backwards():
        warn_user(
            "compiled autograd traces the backward of this graph anew and compiles it without the plan's order and without a "
            f"look at its peak: the budget of {format_bytes(report.budget_bytes)} does not hold. Switch "
            "torch._dynamo.config.compiled_autograd off",
            BudgetWarning,
        )


class TransferCheck:
    """Compares the bytes that each half of a call moves between the device and the host with the ``planned`` ones.

    A compiler pass that drops or repeats a copy would otherwise cost memory, or results, in silence. Each half runs in one
    thread, so calls of other threads, several forwards before a backward, and a second backward of a kept graph change nothing.
    """

    def __init__(self, compiled: Compiled, planned: int) -> None:
        self.compiled, self.planned = compiled, planned
        self._running = threading.local()  # the counts of this thread when the backward began that it runs

    def __call__(self, *args: Any) -> Any:
        """Returns the outputs of the graph. Raises ``TransferError`` if the forward moves other bytes than planned."""
        before = host_memory.moved.to_host_bytes
        outputs = self.compiled(*args)
        done = host_memory.moved.to_host_bytes - before
        if done != self.planned and (infers_metadata() or any(map(is_fake, outputs))):
            return outputs  # no part of a step: the call only shows shapes, to a pipeline or to DDP's buckets
        self._compare("forward", "to", done)
        node = backward_node(outputs, args)
        if node is not None:
            around_backward(node, self._begin_backward, self._end_backward)
        return outputs

    def _begin_backward(self, *_: Any) -> None:
        self._running.from_host_bytes, self._running.replaced = host_memory.moved.from_host_bytes, host_memory.moved.replaced

    def _end_backward(self, *_: Any) -> None:
        if host_memory.moved.replaced == self._running.replaced:
            self._compare("backward", "from", host_memory.moved.from_host_bytes - self._running.from_host_bytes)

    def _compare(self, half: str, direction: str, done: int) -> None:
        if done != self.planned:
            raise TransferError(
                f"the {half} of a compiled graph has moved {done} bytes {direction} the host, and its plan moves "
                f"{self.planned}: a pass of the compiler has dropped or repeated copies. Compile without host_memory, and "
                "report this"
            )


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
    is_broken = bool(frames.reasons.behind()) or dynamo.graph_break_around(gm) is not None or split_graphs.is_split()
    if dynamo.computes_gradients(gm):
        reason = (
            "it computes gradients itself, by torch.func.grad, vjp or torch.autograd.grad, so torch hands over forward and "
            "backward as one graph, which keeps what it needs. Return a loss, of gradients or not, and call backward() on it"
        )
    elif not torch.is_grad_enabled() or is_broken or not is_explicit or any(tensor in _trained for tensor in read):
        return  # an evaluation, or a part of a function
    else:
        reason = (
            "it has no backward, because no parameter or input requires a gradient, or nothing is returned that depends on "
            "one. Let one require a gradient, or evaluate under torch.no_grad()"
        )
    warn_user(f"memory_budget has no effect on {source_info.begin_of(gm.graph)}: {reason}", OptionWarning)
