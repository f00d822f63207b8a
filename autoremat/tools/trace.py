"""Traces the joint graphs of a training step without running it: Dynamo and AOTAutograd see tensors without memory.

The path is the backend's own up to the partitioner, so the graphs are those that the backend would plan. A visitor receives
each graph instead of the compiler. The code between two graphs continues with fake results.

A CUDA device that is not present is represented by the CPU, because autograd refuses even fake CUDA tensors without a CUDA
device. The parts that depend on the device follow CUDA's rules: attention kernels, autocast, decompositions, workspaces,
allocation rounding and rates.
"""

import contextlib
import copy
import functools
import traceback
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx, nn

from autoremat.basics.errors import AutorematError, CaptureError, OptionsError, causes, unwrapped
from autoremat.basics.progress import now
from autoremat.capture.capture import device_of_inputs, may_train
from autoremat.capture.pricing import ROOFLINE
from autoremat.capture.source_info import take_names
from autoremat.compiler.breaks import listen, note_on_breaks, what_dynamo_said
from autoremat.compiler.problem import Problem
from autoremat.measure.calibration import checked_device
from autoremat.options.options import OWN_KEYS, Options
from autoremat.planner.cost.datasheets import UNKNOWN_GPU, datasheet, device_memory, known_cards
from autoremat.request.budgets import refuse_step_profiles, request_of
from autoremat.request.surroundings import Surroundings
from autoremat.tools.cuda_kernels import attention_on_cuda, use_kernels_of_cuda, write_casts
from autoremat.torch_private import compilers, fake_tensors, frames, named_card
from autoremat.torch_private.dynamo import graph_breaks
from autoremat.torch_private.tensors import tensors_in


@dataclass(frozen=True)
class Target:
    """The device to plan for, and the device of the fake tensors that represent it."""

    traced_on: torch.device
    cuda_name: str | None = None
    """Name of the CUDA device that is planned for by its data sheet; None to plan for ``traced_on`` itself."""
    notes: tuple[str, ...] = ()

    @property
    def is_represented(self) -> bool:
        """True if tensors of the CPU stand for those of a card."""
        return self.cuda_name is not None and self.traced_on.type != "cuda"

    def as_on_card(self, module: fx.GraphModule) -> fx.GraphModule:
        """Returns ``module``, rewritten in place with the casts and the kernels of a card that the CPU represents."""
        for part in module.modules() if self.is_represented else ():
            if isinstance(part, fx.GraphModule):
                write_casts(part.graph)
                use_kernels_of_cuda(part.graph, self.capability)
                part.recompile()
        return module

    def tracing(self) -> AbstractContextManager[None]:
        """Returns the context in which torch traces a graph for this device, also for a card that the CPU represents."""
        if not self.is_represented:
            return contextlib.nullcontext()
        return named_card.traced_as_on_card(functools.partial(attention_on_cuda, capability=self.capability))

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability of a card by name; that of a middling one for an unknown card."""
        return (datasheet(self.cuda_name or "") or UNKNOWN_GPU).capability

    def problem(self, options: Options, module: fx.GraphModule, inputs: Sequence[Any], resident_bytes: int) -> Problem:
        """Returns the problem of a graph that is planned for this device, beside ``resident_bytes`` of tensors.

        A card by name has the rates of its data sheet.
        """
        around = Surroundings(device_of_inputs(module, inputs), module, inputs, runs_here=False)
        if self.cuda_name is not None:
            memory = device_memory(self.cuda_name)
            free = None if memory is None else max(0, memory - resident_bytes)
            around = replace(around, free_bytes_of=lambda device: free, is_card=True)
            options = replace(options, cost_model=ROOFLINE)
        patches = {**compilers.asked_config(options), **fake_tensors.RUNS_NOTHING}
        own = fake_tensors.own_inputs(inputs)
        return Problem(request_of(options, around), module, own, patches, self.cuda_name, may_repeat_collectives=True)


def target_of(device: str | torch.device | None, tensors: Iterable[torch.Tensor]) -> Target:
    """Returns the target that ``device`` means for a step that reads ``tensors``.

    ``device`` is a torch device, or the name of a CUDA GPU such as "H100-80GB". None means the device of the tensors. For
    tensors without data (meta) it means CUDA if present, else the CPU.

    Raises ``OptionsError`` for anything else.
    """
    if device is None:
        found = next((t.device for t in tensors if t.device.type != "meta"), None)
        if found is None:
            found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Target(checked_device(found))
    if isinstance(device, str) and device_memory(device) is not None:
        return _named(device)
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        parsed = torch.device("meta")
    if parsed.type == "cuda" and not torch.cuda.is_available():
        return _named("cuda")
    if parsed.type == "meta":
        raise OptionsError(
            f'device={device!r} is not accepted. Accepted: a device of torch ("cpu", "cuda") or a CUDA card by name, with its '
            f'memory if that is another ("V100-16GB"). {known_cards(str(device))}'
        )
    return Target(checked_device(parsed))


def _named(name: str) -> Target:
    if torch.cuda.is_available():
        return Target(torch.device("cuda"), name)
    notes = [f"no CUDA device is here: traced on the CPU, planned by the figures of {name}"]
    if device_memory(name) is None:
        notes.append('no card is named: the figures are those of a middling one (name it, as in device="H100-80GB")')
    return Target(torch.device("cpu"), name, tuple(notes))


T = TypeVar("T")


def trace(
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    device: str | torch.device | None,
    visit: Callable[[Target, Problem, fx.GraphModule], T | None],
) -> tuple[list[T], tuple[str, ...]]:
    """Returns what ``visit`` returns for the graphs that train, without None (at least one), and notes for the user.

    ``model_or_fn(*args, **kwargs)`` is traced and does not run. ``visit`` receives the device to plan for, and each graph that
    may train as Dynamo captured it. Models are found among the arguments, in the closures of a function and in the globals that
    it names. Raises ``CaptureError`` if nothing can be planned, and ``OptionsError`` if the budget is a step profile.
    """
    refuse_step_profiles(options)
    models = list(dict.fromkeys(model for thing in (model_or_fn, *args, *kwargs.values()) for model in models_in(thing)))
    own = [t for model in models for t in (*model.parameters(), *model.buffers())]
    given = tensors_in((args, dict(kwargs)))
    target = target_of(device, [*own, *given])
    mode = fake_tensors.new_mode()
    fake = _faking(mode, target, next((tensor.device.type for tensor in (*own, *given)), "cpu"))
    fake_args, fake_kwargs = torch.utils._pytree.tree_map(
        lambda leaf: fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, (tuple(args), dict(kwargs))
    )
    resident = sum(t.numel() * t.element_size() for t in {id(t): t for t in (*own, *given)}.values())
    found, notes = list[T | None](), list(target.notes)

    def record(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        take_names(module)
        runnable = fake_tensors.copied_module(module)
        if may_train(module, inputs):
            found.append(visit(target, target.problem(options, module, inputs, resident), module))
        now("following the rest of the step")
        return runnable.forward

    breaks, reasons = graph_breaks(), frames.reasons.count
    listen()
    with _borrowed(models, [model_or_fn, *args, *kwargs.values()], fake), mode, warnings.catch_warnings():
        if target.is_represented:  # autocast on CUDA is written into the graphs
            warnings.filterwarnings("ignore", "CUDA is not available or torch_xla is imported", UserWarning)
        try:
            now("tracing the step")
            fake_tensors.compiled_by(_fresh(model_or_fn), record)(*fake_args, **fake_kwargs)
        except Exception as error:  # raised by the model's code, torch's tracing or the visitor
            notes.append(_stopped(error, bool(found)))
    if graph_breaks() - breaks:  # Dynamo counts a break more than once
        notes.append(note_on_breaks(reasons))
    return _results(found, reasons), tuple(notes)


def _faking(mode: Any, target: Target, home: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function from a tensor to its fake. Those on devices of the type ``home`` are on the device to plan for."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        moves = tensor.device.type in (home, "meta") or home == "meta"
        if id(tensor) not in fakes:
            fakes[id(tensor)] = fake_tensors.fake_like(mode, tensor, target.traced_on if moves else tensor.device)
        return fakes[id(tensor)]

    return fake


def _results(found: list[T | None], reasons: int) -> list[T]:
    """Returns the results that are not None. Raises ``CaptureError``, with what Dynamo said since ``reasons``, without any."""
    results = [result for result in found if result is not None]
    if results:
        return results
    if found:
        raise CaptureError("nothing to plan: the graphs of the step have no backward of their own")
    said = what_dynamo_said(reasons)
    raise CaptureError(
        "nothing to plan: no graph of the step has a backward. Is gradient mode on, does a parameter or input require a "
        "gradient, and does the function return something that depends on it?" + (f"\n{said}" if said else "")
    )


def _stopped(error: Exception, found: bool) -> str:
    """Returns a note on the error that ended the tracing early. Raises it if it is of this package, or came first."""
    for cause in causes(error):
        if isinstance(cause, (AutorematError, Warning)):  # users can turn warnings into errors
            raise cause from None
    inner = unwrapped(error)
    if isinstance(error, fake_tensors.FAILED_OP):
        *_, inner = causes(error)
    message = str(inner).strip().partition("\n")[0]
    if not message and (places := traceback.extract_tb(inner.__traceback__)):
        message = f"{places[-1].filename}:{places[-1].lineno}"
    reason = f"{type(inner).__name__}: {message or 'no message'}"
    if not found:
        hint = ""
        if isinstance(error, fake_tensors.NEEDS_DATA):
            hint = ": outside of compiled graphs the step looks at the values of a tensor, which there are none of"
        if key := next((key for key in OWN_KEYS if f"unexpected keyword argument '{key}'" in reason), ""):
            hint = f": {key} is an option, to be given as options={{{key!r}: ...}}"
        raise CaptureError(f"the step cannot be traced without running it{hint} ({reason})") from error
    return f"tracing ended after a graph break, what comes later is missing ({reason})"


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls ``function`` and has code of its own."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)


@contextlib.contextmanager
def _borrowed(
    models: Sequence[nn.Module], around: Sequence[object], fake: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Replaces parameters and buffers by fake tensors, and restores them and all containers in ``models`` and ``around``."""
    parts = list(dict.fromkeys(part for model in models for part in model.modules()))
    kept = _contents([*(vars(part) for part in parts), *around])
    try:
        for part in parts:
            for tensors in (part._parameters, part._buffers):
                tensors.update({name: fake(t) for name, t in tensors.items() if t is not None})  # type: ignore[misc]
        yield
    finally:
        for container, before in kept:
            if list(map(id, _items(container))) != list(map(id, _items(before))):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(before)


_CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict, Counter)
"""Types of containers that are restored. Derived types are left out, because they may refuse to be cleared and refilled."""


def _contents(roots: Sequence[object]) -> list[tuple[Any, Any]]:
    """Returns the containers that ``roots`` are or lead to, dicts of attributes included, each with a copy."""
    found: dict[int, tuple[Any, Any]] = {}
    level = list(roots)
    for _ in range(frames.REACH + 2):  # dicts of attributes are levels too
        inner: list[object] = []
        for thing in level:
            if id(thing) in found or isinstance(thing, (torch.Tensor, type, types.ModuleType)):
                continue
            if type(thing) in _CONTAINERS:
                found[id(thing)] = (thing, copy.copy(thing))
                inner += thing.values() if isinstance(thing, dict) else _items(thing)
            elif hasattr(thing, "__dict__") and not isinstance(
                thing, (types.FunctionType, types.MethodType, functools.partial)
            ):
                inner.append(vars(thing))
            else:
                inner += frames.parts_of(thing)
        level = inner
    return list(found.values())


def _items(container: Any) -> list[object]:
    """Returns the contents of the container in sequence; for a dict, keys and values alternate."""
    return [part for item in container.items() for part in item] if isinstance(container, dict) else list(container)


def models_in(thing: object, depth: int = frames.REACH, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """Yields the modules that a call of ``thing`` may reach."""
    seen = set() if seen is None else seen
    if id(thing) in seen or depth < 0:
        return
    seen.add(id(thing))
    if isinstance(thing, nn.Module):
        yield thing
        return
    for inner in frames.parts_of(thing):
        yield from models_in(inner, depth - 1, seen)
