"""Torch's private names for graphs that are compiled in parts: for the buckets of data parallelism, or for early gradients."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._guards import TracingContext

from autoremat.torch_private.dynamo import copied_with_sources
from autoremat.torch_private.fake_tensors import is_fake
from autoremat.torch_private.hooks import assigned, held


@dataclass(frozen=True)
class GradientHooks:
    """What is known of the hooks that run as soon as a gradient of the graph's inputs is made."""

    freed: frozenset[str] = frozenset()
    """Names of the inputs whose hooks free their gradients."""
    bytes: int = 0
    """The most bytes that a hook allocates beside gradients, for as long as it runs."""
    note: str = ""
    """A line for the reports of the parts."""
    are_unknown: bool = False
    """True if there are hooks, and gradients count as kept because nobody says that the hooks free them."""


_hooks: WeakKeyDictionary[Any, GradientHooks] = WeakKeyDictionary()
"""The hooks of the graphs that :func:`compile_parts` compiles now, by ``owner``."""


_part: ContextVar[tuple[Any, fx.Node] | None] = ContextVar("autoremat_part", default=None)
"""The owner and the node of the part that is compiled now."""


@dataclass(frozen=True, eq=False)
class Split:
    """A graph of Dynamo that was split, at the part that is compiled now.

    ``owner`` is one object for all parts of a graph. ``number`` counts the parts in the sequence of the forward, from 0.
    """

    owner: Any
    number: int
    count: int
    hooks: GradientHooks | None
    """The hooks for whose sake the graph was split; None if torch's ``DDPOptimizer`` has split it."""


@dataclass(frozen=True, eq=False)
class PartOfGraph:
    """One part: a copy of its graph, its fake inputs, and the fake results of calling it."""

    module: fx.GraphModule
    inputs: Sequence[Any]
    outputs: Sequence[Any]


def is_split() -> bool:
    """Returns True if the graph that Dynamo compiles now was split."""
    context = TracingContext.try_get()
    marks = [getattr(context, name, None) for name in ("ddp_optimizer_ctx", "fakify_first_call")]
    return any(mark is not None and mark is not False for mark in marks)


def current_split() -> Split | None:
    """Returns the split whose part is compiled now; None if there is none."""
    found = _part.get()
    if found is None or not isinstance(found[0].module, fx.GraphModule):
        return None
    owner, node = found
    calls = [call for call in owner.module.graph.nodes if call.op == "call_module"]
    return Split(owner, calls.index(node), len(calls), _hooks.get(owner))


def watch_parts() -> None:
    """Notes from now on which part of a split graph torch compiles. Repeated calls have no effect."""
    from torch._dynamo.backends.distributed import SubmodCompiler

    run_node: Any = SubmodCompiler.run_node
    if hasattr(run_node, "is_watched"):
        return

    def watched(owner: Any, node: fx.Node) -> Any:
        with held(_part, (owner, node)):
            return run_node(owner, node)

    vars(watched)["is_watched"] = True
    setattr(SubmodCompiler, run_node.__name__, watched)


def parts_of(split: Split) -> tuple[Sequence[PartOfGraph], Mapping[str, Any], Sequence[Any]]:
    """Returns all parts of ``split``, the tensors that the whole graph receives, by name, and those that it returns.

    Must be called while the first part is compiled, because compiled ones replace it. All tensors are fake; nothing runs.
    """
    from torch._dynamo.utils import to_fake_tensor

    owner = split.owner
    walk, known = _Walk(owner), dict(owner.env)
    for node, value in owner.env.items():
        if isinstance(value, torch.Tensor) and not is_fake(value):
            known[node] = to_fake_tensor(value, owner.fake_mode)  # as torch shows it to the parts; they change no real one
    with owner.fake_mode, assigned(owner.fake_mode, "allow_non_fake_inputs", True):  # as torch does between two parts
        returned = walk.run(initial_env=dict(known), enable_io_processing=False)
    received = {node.name: value for node, value in known.items() if node.op == "placeholder"}
    return walk.found, received, list(torch.utils._pytree.tree_leaves(returned))


def compile_parts(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    part_of: Mapping[fx.Node, int],
    compile_part: Callable[[fx.GraphModule, Sequence[Any]], Any],
    hooks: GradientHooks,
) -> Callable[..., Any]:
    """Returns a callable for a captured graph that calls the parts of it one by one, each compiled by ``compile_part``.

    Dynamo must be compiling ``module``.
    """
    from torch._dynamo.backends import distributed
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
    from torch.fx.passes.split_module import split_module

    context: Any = TracingContext.try_get()
    split: Any = split_module(module, None, part_of.__getitem__)  # type: ignore[arg-type]  # torch reads no root
    distributed.propagate_dynamo_source(module, split)
    distributed.propagate_metadata(module, split)
    owner: Any = distributed.SubmodCompiler(split, compile_part, context.fake_mode)
    owner.env.update(zip(split.graph.find_nodes(op="placeholder"), inputs, strict=True))
    _hooks[owner] = hooks
    with _disable_saved_tensors_hooks_during_tracing():
        owner.run(*inputs)
    owner.module.recompile()
    compiled: Callable[..., Any] = owner.module
    return compiled


class _Walk(fx.Interpreter):
    def __init__(self, owner: Any) -> None:
        super().__init__(owner.module, garbage_collect_values=False)
        self.fake_mode = owner.fake_mode
        self.found: list[PartOfGraph] = []

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch._dynamo.utils import deepcopy_to_fake_tensor

        module: Any = self.fetch_attr(str(target))
        outputs = deepcopy_to_fake_tensor(module, self.fake_mode)(*args)
        copied = copied_with_sources(module)
        output: Any = copied.graph.output_node()
        is_tuple = isinstance(output.args[0], (tuple, list))
        single = not is_tuple or len(output.args[0]) == 1  # splitting never makes a tuple of one, so torch made this one
        if not is_tuple:
            output.args = ((output.args[0],),)
            copied.recompile()
        if single and isinstance(outputs, (tuple, list)):  # torch has put a tuple around the result of the present part
            outputs = outputs[0]
        self.found.append(PartOfGraph(copied, args, (outputs,) if single else tuple(outputs)))
        return outputs


@contextlib.contextmanager
def tracing_undone() -> Iterator[None]:
    """Restores the attributes of Dynamo's tracing context after the body."""
    context = TracingContext.try_get()
    before = {} if context is None else dict(vars(context))
    try:
        yield
    finally:
        if context is not None:
            vars(context).update(before)


def gradients_become_views() -> bool:
    """Returns True if the gradients of the model that runs now are moved into the buckets of ``DistributedDataParallel``."""
    wrapper: Any = torch.nn.parallel.DistributedDataParallel
    active = wrapper._get_active_ddp_module()
    return active is not None and bool(active.gradient_as_bucket_view and active.require_backward_grad_sync)
