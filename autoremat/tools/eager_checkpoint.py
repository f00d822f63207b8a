"""Applies a plan without ``torch.compile``, as the policy of torch's selective activation checkpointing.

Eager training runs other ops than the planned graph: nothing is fused or decomposed, and equal ops are not merged. The plan's
ops are therefore matched with calls of the model. A match needs the same module, the same ATen op, and the same number of
earlier calls of that op in that module.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autoremat.basics.errors import OptionWarning
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Role
from autoremat.planner.plans.plan import Plan
from autoremat.torch_private.running_module import running_module
from autoremat.torch_private.untraced import untraced

LEAST_SHARE = 0.5
"""Share of the bytes of a call's result that the plan must save for eager training to save the result."""

WORTH_SAYING = 0.02
"""Share of the plan's saved bytes that may stay unmatched without a warning."""

DROPOUT, RANDOM_FILL, SCALING = "aten.native_dropout.default", "aten.bernoulli_.float", "aten.mul.Tensor"
"""Names of ops. The graph always contains the first. Eager training on a CPU draws a mask with the second and multiplies by it
with the third."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an ATen op. ``number`` is the number of earlier calls of that op in the same module."""

    module: str
    op: str
    number: int


def saved_calls(plan: Plan) -> dict[Call, int]:
    """Returns the calls of the model whose results the plan saves at least by half, with the saved bytes."""
    graph, saved = plan.graph, set(plan.saved)
    numbers: Counter[tuple[str, str]] = Counter()
    found: dict[Call, int] = {}
    for (module, op), members in _calls(plan):
        call = Call(module, op, numbers[module, op])
        numbers[module, op] += 1
        made = [v for index in members for v in graph.ops[index].outputs]
        kept = sum(graph.values[v].bytes for v in made if v in saved)
        leaving = [v for v in made if any(r > members[-1] and r < graph.num_forward for r in graph.readers[v])]
        result = sum(graph.values[v].bytes for v in leaving) or kept
        if kept and kept >= LEAST_SHARE * result:
            found[call] = kept
    return found


def _calls(plan: Plan) -> Iterator[tuple[tuple[str, str], list[int]]]:
    """Yields the calls of the model with their forward ops. Consecutive parts of one decomposed op belong to one call."""
    ops = plan.graph.ops
    calls = (index for index in range(plan.graph.num_forward) if not _lays_for_convolution(plan.graph, index))

    def key(index: int) -> tuple[Any, ...]:
        op = ops[index]
        return op.module, _functional(op.decomposed_from or op.target), op.source, "" if op.decomposed_from else index

    for (module, target, _, _), members in itertools.groupby(calls, key):
        yield (module, target), list(members)


def _lays_for_convolution(graph: Graph, index: int) -> bool:
    """Returns True for a copy of an input that a convolution reads. Eager training makes none."""
    op = graph.ops[index]
    if op.target != "aten.clone.default" or any(graph.values[v].role is not Role.INPUT for v in op.inputs):
        return False
    return any(graph.ops[r].target.startswith("aten.convolution") for v in op.outputs for r in graph.readers[v])


def _functional(target: str) -> str:
    """Returns the name of an op without the underscore of its in-place variant: the planned graph has no in-place ops."""
    name, dot, overload = target.rpartition(".")
    return f"{name.rstrip('_')}{dot}{overload}" if dot else target


# -- the region that is checkpointed -----------------------------------------------------------------------------------


@dataclass
class CheckpointContext:
    """The ``context_fn`` for ``torch.utils.checkpoint``: each call returns the two contexts of one run of a region."""

    saved: Mapping[Call, int]
    model: nn.Module | None = None
    told: set[Call] = field(default_factory=set)
    """Calls that a warning has already reported."""

    def __post_init__(self) -> None:
        self.paths = Paths({call.module for call in self.saved})
        if self.model is not None:
            self.paths.add(self.model)

    def __call__(self) -> Contexts:
        """Returns the contexts of the region's forward and of its recomputation."""
        region = _Region(self)
        forward, again = create_selective_checkpoint_contexts(region.policy)  # type: ignore[no-untyped-call]
        return _Watched(region, forward), again

    def warn(self, missed: Mapping[Call, int]) -> None:
        """Warns once about planned saves that did not occur, given as calls with their bytes."""
        new = {call: size for call, size in missed.items() if call not in self.told}
        self.told.update(new)
        if sum(new.values()) > WORTH_SAYING * sum(self.saved.values()):
            first = next(iter(new))
            where = f"call {first.number} of {first.op} in {first.module or 'the model'}"
            warn_user(
                f"{len(new)} results that the plan saves ({format_bytes(sum(new.values()))}, the first is {where}) were not "
                f"met in eager training and are recomputed: the model runs other ops there than the graph that was planned",
                OptionWarning,
            )


class Paths:
    """Maps modules to their paths in the plan.

    A region may be the whole model or, if the model is known, any part of it.
    """

    def __init__(self, planned: set[str]) -> None:
        self.planned = planned
        self.names: dict[int, str] = {}

    def add(self, root: nn.Module) -> None:
        """Records the paths of ``root`` and of the modules in it. Their paths in the plan may have a longer prefix."""
        names = dict(root.named_modules(remove_duplicate=False))
        votes: Counter[str] = Counter()
        for path in self.planned:
            votes.update(path[: len(path) - len(name)] for name in names if name and f".{path}".endswith(f".{name}"))
        best = votes.most_common(2)
        prefix = best[0][0] if best else ""
        if len(best) == 2 and best[0][1] == best[1][1]:
            prefix = "(unknown)."
            warn_user(
                f"a checkpointed region begins in a {type(root).__name__} and the plan has several: nothing is saved. "
                f"Give the model: autoremat.selective_checkpoint_context(plan, model)",
                OptionWarning,
            )
        for name, module in names.items():
            self.names.setdefault(id(module), prefix + name if name else prefix.rstrip("."))


class _Region:
    """One run of a checkpointed region: the running modules, the calls so far, and the decisions."""

    def __init__(self, context: CheckpointContext) -> None:
        self.context = context
        around = context.paths.names.get(id(running_module()))  # a region may be the forward of a module that runs already
        self.running: list[str] = [] if around is None else [around]
        self.entered: set[str] = set()
        self.seen: Counter[tuple[str, str]] = Counter()
        self.masked: set[str] = set()
        """Modules that have drawn a mask and not yet multiplied by it."""
        self.met: set[Call] = set()
        self.decided: dict[Any, list[CheckpointPolicy]] = defaultdict(list)
        self.thread = threading.get_ident()
        self.repeated: Counter[Any] = Counter()

    # Torch calls both hooks for every module of the process, in all threads.

    def enter(self, module: nn.Module, _inputs: Any) -> None:
        """Records that ``module`` begins, as a hook before its forward."""
        if threading.get_ident() != self.thread:
            return
        paths = self.context.paths
        if id(module) not in paths.names:
            paths.add(module)
        self.running.append(paths.names[id(module)])
        self.entered.add(self.running[-1])

    def leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        """Records that the running module ends, as a hook after its forward."""
        if threading.get_ident() == self.thread:
            self.running.pop()

    def policy(self, ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        """Returns the decision for an op of the forward; torch 2.11 asks again for each op of the recomputation."""
        if ctx.is_recompute:
            self.repeated[op] += 1
            return self.decided[op][self.repeated[op] - 1]
        call = self.call_of(str(op))
        self.met.add(call)
        saves = call in self.context.saved and not op._schema.is_mutable
        self.decided[op].append(CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE)
        return self.decided[op][-1]

    def call_of(self, op: str) -> Call:
        """Returns the call of the model to which ``op`` corresponds."""
        module, target = self.running[-1] if self.running else "", _functional(op)
        if op == RANDOM_FILL:
            self.masked.add(module)
        elif op == SCALING and module in self.masked:
            self.masked.remove(module)
            target = DROPOUT
        self.seen[module, target] += 1
        return Call(module, target, self.seen[module, target] - 1)

    def finish(self) -> None:
        """Warns about planned saves that did not occur in the modules that ran, after the forward."""
        saved = self.context.saved
        self.context.warn({call: saved[call] for call in saved if call.module in self.entered and call not in self.met})


class _Watched(AbstractContextManager[None]):
    """Torch's own context, extended by hooks that tell the region which module runs."""

    def __init__(self, region: _Region, inner: AbstractContextManager[Any]) -> None:
        self.region, self.inner, self.stack = region, inner, ExitStack()

    def __enter__(self) -> None:
        for hook in (
            register_module_forward_pre_hook(untraced(self.region.enter)),
            register_module_forward_hook(untraced(self.region.leave), always_call=True),
        ):
            self.stack.callback(hook.remove)
        self.stack.enter_context(self.inner)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self.stack.__exit__(kind, error, trace)
        if error is None:
            self.region.finish()
        return None


def selective_checkpoint_context(plan: Plan, model: nn.Module | None = None) -> CheckpointContext:
    """Returns ``plan`` as a ``context_fn`` for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

    With it a checkpointed region saves the results that the plan saves, and recomputes all others. The region is the whole
    model, or a function that calls it. If ``model`` is given, any parts of it may be regions:
    modules, or their ``forward`` alone, as from transformers 5.24 on. Gradients are those of training
    without checkpoints. Eager training differs from the compiled step in four ways:

    - Torch's checkpoint repeats a region from its start when the backward first needs any of its tensors. The peak of one large
      region is therefore higher than the plan's, while its saved bytes are near the plan's. One region per layer lowers the
      peak, but the inputs of each region are then saved too.
    - The plan's ops are matched with calls of the model by module, ATen op and number. Inside a decomposed op (a layer norm, a
      GELU) the plan may save a tensor that eager training does not have. The whole result is then saved if the plan saves at
      least half of its bytes. An ``OptionWarning`` reports planned saves that did not occur.
    - Saved tensors stay on the device, whatever their form in the plan. An ``OptionWarning`` reports such forms.
    - Results of in-place ops are recomputed. If the model overwrites a saved result, torch raises an error in the backward.

    The plan must come from a model that was compiled or explained. Source: https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    if stays := plan.schedule.stays:
        warn_user(
            f"eager training saves on the device, and the plan keeps {len(stays)} saved tensors in other forms, as on the host",
            OptionWarning,
        )
    return CheckpointContext(saved_calls(plan), model)
