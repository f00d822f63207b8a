"""Traces the joint graphs of a training step without running it: Dynamo and AOTAutograd see tensors without memory.

The path is the backend's own up to the partitioner, so the graphs are those that the backend would plan. A visitor receives
each graph instead of the compiler. The code between two graphs continues with fake results.

A CUDA device that is not present is represented by the CPU, because autograd refuses even fake CUDA tensors without a CUDA
device. The parts that depend on the device follow CUDA's rules: attention kernels, autocast, decompositions, workspaces,
allocation rounding and rates.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import fx, nn

from autoremat.basics.errors import AutorematError, CaptureError, causes
from autoremat.basics.progress import now
from autoremat.capture.capture import may_train
from autoremat.capture.source_info import take_names
from autoremat.compiler.breaks import BETWEEN_GRAPHS, listen, what_dynamo_said
from autoremat.ops.tensors import tensors_in
from autoremat.options.options import OWN_KEYS
from autoremat.tools.target import Target, target_of
from autoremat.torch_private import fake_tensors, frames
from autoremat.torch_private.dynamo import graph_breaks

T = TypeVar("T")

CapturedVisitor = Callable[[fx.GraphModule, Sequence[Any]], Sequence[T]]
"""Receives each graph that may train as Dynamo captured it, with its inputs. Returns any number of results."""


@dataclass
class _Recorder(Generic[T]):
    """A Dynamo backend that passes graphs to a visitor and compiles nothing."""

    visit: CapturedVisitor[T]
    found: list[T] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        take_names(module)
        runnable = fake_tensors.copied_module(module)
        if may_train(module, inputs):
            self.found.extend(self.visit(module, inputs))
        now("following the rest of the step")
        return runnable.forward


def trace(
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str | torch.device | None,
    visit: Callable[[Target, int], CapturedVisitor[T | None]],
) -> tuple[list[T], tuple[str, ...]]:
    """Returns a visitor's results that are not None (at least one), and notes for the user.

    ``model_or_fn(*args, **kwargs)`` is traced and does not run. ``visit`` maps the target and the bytes that exist before the
    step to the visitor, which receives each graph that may train. Models are found in the closures of a function and in the
    globals that it names. Raises ``CaptureError`` if nothing can be planned.
    """
    models = list(dict.fromkeys(models_in(model_or_fn)))
    own = [t for model in models for t in (*model.parameters(), *model.buffers())]
    given = tensors_in((args, dict(kwargs)))
    target = target_of(device, [*own, *given])
    mode = fake_tensors.new_mode()
    fakes: dict[int, torch.Tensor] = {}
    home = next(iter([*own, *given]), torch.empty(0, device="cpu")).device

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        moves = tensor.device.type in (home.type, "meta") or home.type == "meta"
        if id(tensor) not in fakes:
            fakes[id(tensor)] = fake_tensors.fake_like(mode, tensor, target.traced_on if moves else tensor.device)
        return fakes[id(tensor)]

    fake_args, fake_kwargs = torch.utils._pytree.tree_map(
        lambda leaf: fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, (tuple(args), dict(kwargs))
    )
    resident = sum(t.numel() * t.element_size() for t in {id(t): t for t in (*own, *given)}.values())
    recorder = _Recorder(visit(target, resident))
    notes = list(target.notes)
    breaks, reasons = graph_breaks(), frames.reasons.count
    listen()
    with _borrowed(models, [model_or_fn, *args, *kwargs.values()], fake), mode, warnings.catch_warnings():
        if target.is_represented:  # autocast on CUDA is written into the graphs
            warnings.filterwarnings("ignore", "CUDA is not available or torch_xla is imported", UserWarning)
        try:
            now("tracing the step")
            fake_tensors.compiled_by(_fresh(model_or_fn), recorder)(*fake_args, **fake_kwargs)
        except Exception as error:  # raised by the model's code, torch's tracing or the visitor
            notes.append(_stopped(error, bool(recorder.found)))
    if not recorder.found:
        said = what_dynamo_said(reasons)
        raise CaptureError(
            "nothing to plan: no graph of the step has a backward. Is gradient mode on, does a parameter or input require a "
            "gradient, and does the function return something that depends on it?" + (f"\n{said}" if said else "")
        )
    found = [result for result in recorder.found if result is not None]
    if not found:
        raise CaptureError("nothing to plan: the graphs of the step have no backward of their own")
    if graph_breaks() - breaks:  # Dynamo counts a break more than once
        notes.append(f"Dynamo broke graphs: {BETWEEN_GRAPHS}")
    return found, tuple(notes)


def _stopped(error: Exception, found: bool) -> str:
    """Returns a note on the error that ended the tracing early. Raises it if it is of this package, or came first."""
    for cause in causes(error):
        if isinstance(cause, (AutorematError, Warning)):  # users can turn warnings into errors
            raise cause from None
    inner = getattr(error, "inner_exception", error)
    if isinstance(error, fake_tensors.FAILED_OP):
        *_, inner = causes(error)
    reason = f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0] or 'no message'}"
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
            if list(map(id, _items(container))) != list(map(id, before)):
                container.clear()
                refill = dict(zip(before[::2], before[1::2], strict=True)) if isinstance(container, dict) else before
                (container.extend if isinstance(container, (list, deque)) else container.update)(refill)


_CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict, Counter)
"""Types of containers that are restored. Derived types are left out, because they may refuse to be cleared and refilled."""


def _contents(roots: Sequence[object]) -> list[tuple[Any, list[object]]]:
    """Returns the containers that ``roots`` are or lead to, dicts of attributes included, with their contents."""
    found: dict[int, tuple[Any, list[object]]] = {}
    level = list(roots)
    for _ in range(frames.REACH + 2):  # dicts of attributes are levels too
        inner: list[object] = []
        for thing in level:
            if (
                isinstance(thing, (str, bytes, int, float, torch.Tensor, type, types.ModuleType, type(None)))
                or id(thing) in found
            ):
                continue
            if type(thing) in _CONTAINERS:
                found[id(thing)] = (thing, _items(thing))
                inner += thing.values() if isinstance(thing, dict) else _items(thing)
            elif isinstance(thing, (types.FunctionType, types.MethodType, functools.partial, tuple)):
                inner += frames.parts_of(thing)
            elif isinstance(attributes := getattr(thing, "__dict__", None), dict):
                inner.append(attributes)
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
