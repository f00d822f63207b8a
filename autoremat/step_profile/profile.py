"""``autoremat.profile_step``: profiles a step once and shares one budget among its compiled graphs."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from autoremat.basics.checks import MOST_BYTES, count_given, options_of
from autoremat.basics.errors import OptionsError, StepProfileError
from autoremat.basics.progress import now, status_if_slow
from autoremat.compiler.breaks import listen, what_dynamo_said
from autoremat.compiler.peers import agreed_profile
from autoremat.options.options import Options
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.ledger import Moment
from autoremat.planner.multigraph.step import CODE_HEADROOM, Step
from autoremat.planner.multigraph.step_profile import StepProfile
from autoremat.request.budgets import is_profile, refuse_open_calls, request_of
from autoremat.request.surroundings import RECEIVER, Surroundings
from autoremat.step_profile.recording import Recording, meter_of
from autoremat.torch_private import autograd, compilers, frames
from autoremat.torch_private.hooks import held
from autoremat.torch_private.tensors import tensors_in


def profile_step(
    function: Callable[..., Any],
    *args: Any,
    memory_budget: int | float | str | DeviceBudget | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    regional: bool | None = None,
    variants: int = 3,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> StepProfile:
    """Returns the profile of a training step, in which the step's compiled graphs share one budget.

    A step has several graphs after graph breaks, or if parts of a model are compiled. ``function(*args, **kwargs)`` and its
    backward run twice, as under ``torch.compile(function, backend="autoremat")``, each graph op by op on its plan with the
    minimum peak. The second run is measured. Then every graph gets a plan, such that the step fits at the least time.

    Gradients, random states, and buffers of the modules that ``function`` is, is bound to or closes over, are restored. Other
    side effects occur twice. Post-accumulate-grad hooks, such as an optimizer in the backward, do not run; the option
    ``hooks_free_gradients`` tells that they free the gradients.

    - ``memory_budget``: the budget of the whole step, in bytes, as text such as "60GiB", a device budget, or "auto". A float is
      a share of the step's peak without recomputation; None sets no limit.
    - ``loss``: maps the result of ``function`` to the scalar to differentiate; by default the result itself, or its ``loss``.
    - ``regional``: True if ``function`` contains parts that are compiled with this backend and is itself not to be compiled.
      The default is True for a module with compiled parts and for a result of ``torch.compile``.
    - ``variants``: the most plans of one graph, whose calls only :func:`autoremat.compile_blocks` makes distinguishable.
    - ``options``: those of ``torch.compile``, without ``memory_budget``.

    Pass the result as ``memory_budget``. All that is compiled in this process is compiled again, as after
    ``torch.compiler.reset()``. Ranks whose graphs contain collectives or DTensors have to profile at the same time. They share
    the least budget, and at each moment the memory of the rank that needs the most.

    Raises ``BudgetInfeasible`` if no choice of plans fits, ``OptionsError`` for options that are not accepted, and
    ``StepProfileError`` if no graph can be planned or the loss is no scalar with a gradient.
    """
    parsed, variants = _accepted(options, memory_budget), variants_of(variants)
    is_whole = not (_holds_compiled(function) if regional is None else regional)
    taken = Recording(parsed)
    with status_if_slow("profiling the step", shown=parsed.progress):
        with _compiled_anew(), held(RECEIVER, taken.compile), _undone(function):
            step = torch.compile(function, backend="autoremat", options=dict(options or {}) or None) if is_whole else function
            # Under fully_shard these are the shards, which receive the gradients, and no leaves of the loss.
            parameters = [parameter for module in _modules_of(function) for parameter in module.parameters()]
            moments = _measured(taken, functools.partial(step, *args, **kwargs), loss or _loss_of, parameters)
        now("sharing out the budget")
        passed = [one.untyped_storage().nbytes() for one in tensors_in((args, kwargs)) if one.device.type == taken.device.type]
        request = request_of(parsed, Surroundings(taken.device, passed_bytes=sum(passed)))
        return agreed_profile(recorded_step(taken, moments, variants), request, "the profile of a step")


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    """Makes torch compile all functions again, while active and afterwards."""
    torch.compiler.reset()
    listen()  # the reset has ended it
    try:
        yield
    finally:
        torch.compiler.reset()
        listen()


def _accepted(options: Mapping[str, Any] | None, memory_budget: int | float | str | DeviceBudget | None) -> Options:
    """Returns the options of a step's graphs. Raises ``OptionsError`` for those that a profile decides itself."""
    if "memory_budget" in options_of(options):
        raise OptionsError("a step profile takes `memory_budget` as an argument of its own, not in `options`")
    parsed = Options.parse({**(options or {}), "memory_budget": memory_budget}, None, compilers.inductor_config_names)
    refuse_open_calls(parsed, "a step profile", "in_flight", "accumulate")
    if is_profile(parsed):
        raise OptionsError(
            "a step profile takes a budget of its own, not the result of another one: pass bytes, a share or a device budget"
        )
    return parsed


def variants_of(value: object) -> int:
    """Returns the number of variants. Raises ``OptionsError`` for anything but an int of at least 1."""
    return count_given(value, "variants", "an int >= 1, the maximum number of different plans of one graph", most=MOST_BYTES)


def _measured(
    taken: Recording, step: Callable[[], Any], loss: Callable[[Any], torch.Tensor], parameters: list[nn.Parameter]
) -> list[Moment]:
    """Returns the moments of the step. Runs ``step`` once to trace it and once to measure it."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    reasons = frames.reasons.count
    for attempt in ("trace", "measure"):
        now(f"running it uncompiled, {'once more to measure it' if attempt == 'measure' else 'to trace it'}")
        with torch.random.fork_rng(devices):
            meter = meter_of(taken.device)
            taken.start(meter if attempt == "measure" else None)
            with meter if attempt == "measure" else contextlib.nullcontext():
                _backward(loss(step()), parameters, taken.options.hooks_free_gradients)
    taken.leave_out_other_devices()
    if not any(graph.planned for graph in taken.graphs):
        said = what_dynamo_said(reasons)
        raise StepProfileError(
            "nothing in this step was compiled that could be planned. If `function` only calls parts that are compiled with "
            "backend='autoremat', pass regional=True; gradients must be enabled, and something must require one"
            + (f"\n{said}" if said else "")
        )
    return taken.moments(meter.readings)


def _loss_of(output: Any) -> torch.Tensor:
    """Returns the scalar to differentiate. Raises ``StepProfileError`` if ``output`` contains none."""
    found = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise StepProfileError(
            "the function returns neither a scalar tensor nor something with a `loss`: "
            "pass loss=..., a function from that result to the scalar to differentiate"
        )
    return found


def _free_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _backward(loss: torch.Tensor, parameters: list[nn.Parameter], frees_gradients: bool) -> None:
    """Runs the backward of ``loss`` and restores the gradients of all leaves and ``parameters``.

    Hooks on gradients, such as an optimizer in the backward, do not run. With ``frees_gradients``, others that free them do.
    """
    if not loss.requires_grad:
        raise StepProfileError(
            "the loss does not require a gradient, so there is no backward to profile: it has to depend on a parameter or an "
            "input that requires one, and gradients must be enabled"
        )
    receiving = (*autograd.leaves_of(loss), *parameters)
    before = [tensor.grad for tensor in receiving]
    for tensor in receiving:
        tensor.grad = None
    try:
        with autograd.hooks_replaced(receiving, _free_gradient if frees_gradients else lambda _: None):
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for tensor, gradient in zip(receiving, before, strict=True):
            tensor.grad = gradient


def _modules_of(function: Any) -> list[nn.Module]:
    """Returns the modules that ``function`` is, is bound to, closes over or names as globals."""
    if isinstance(function, nn.Module):
        return [function]
    parts = frames.parts_of(function)
    if isinstance(function, functools.partial | MethodType):
        return [module for part in parts for module in _modules_of(part)]
    return [part for part in parts if isinstance(part, nn.Module)]


def _holds_compiled(function: Any) -> bool:
    if getattr(function, "_torchdynamo_orig_callable", None) is not None:
        return True
    modules = [module for root in _modules_of(function) for module in root.modules()]
    return any(autograd.is_compiled(module) for module in modules)


@contextlib.contextmanager
def _undone(function: Any) -> Iterator[None]:
    parts = [part for module in _modules_of(function) for part in module.modules()]
    named = [(part._buffers, dict(part._buffers)) for part in parts]
    buffers = {id(b): b for _, before in named for b in before.values() if b is not None}
    contents = {key: buffer.detach().clone() for key, buffer in buffers.items()}
    try:
        yield
    finally:
        for present, before in named:
            present.clear()
            present.update(before)
        with torch.no_grad():
            for key, buffer in buffers.items():
                buffer.copy_(contents[key])


def recorded_step(taken: Recording, moments: Sequence[Moment], variants: int) -> Step:
    """Returns the recorded step without the graphs that have no choice of plans."""
    callers, calls = taken.callers, Counter(taken.calls)
    in_step = {number: one.planned.in_step(one.key) for number, one in enumerate(taken.graphs) if one.planned is not None}
    number_of = {graph: number for number, graph in enumerate(dict.fromkeys(caller.graph for caller in callers))}
    begun = ((event.backward, taken.calls[event.call].graph) for event in taken.events if event.begins)
    return Step(
        graphs=tuple(replace(in_step[caller.graph], calls=calls[caller], block=caller.block) for caller in callers),
        moments=tuple(moments),
        order=tuple(f"{'backward' if back else 'forward'} {number_of[g]}" for back, g in begun if g in number_of),
        device=str(taken.device),
        others=tuple(graph.key for graph in taken.graphs if not graph.planned),
        headroom=CODE_HEADROOM if taken.options.compiler == "inductor" else 0.0,
        variants=variants,
        host_bytes=taken.request.limits.host_bytes,
        communicates=taken.communicates,
    )
