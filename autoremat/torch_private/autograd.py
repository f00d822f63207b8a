"""Torch's private names for a step of several graphs: Inductor's path to a joint graph, and autograd's nodes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch.autograd.graph import Node

from autoremat.torch_private.hooks import untraced
from autoremat.torch_private.tensors import storage_key, tensors_in

ACCUMULATES: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
COMPILED_NODE = "CompiledFunctionBackward"
VIEWS_DEEP = 4
"""The number of levels of autograd nodes, from an output on, that are searched for the node of its compiled graph.

AOTAutograd applies views of outputs outside of the graph. Each view adds a level.
"""

VMAPS_DEEP = 3
"""The number of ``vmap`` levels that are looked at in a batched gradient."""


def backward_node(outputs: Iterable[Any], inputs: Iterable[Any] = ()) -> Node | None:
    """Returns the autograd node of the compiled graph that computed ``outputs`` from ``inputs``; None without a backward."""
    others = [one for one in inputs if type(one) is not torch.nn.Parameter]  # these have no node, and are many
    earlier = {node for level in _levels(others) for node in level}  # outputs may be views of other graphs' results
    for level in _levels(outputs):
        for node in level:
            if COMPILED_NODE in node.name() and node not in earlier:
                return node
    return None


def _levels(tensors: Iterable[Any]) -> Iterator[list[Node]]:
    level = [tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None]
    for _ in range(VIEWS_DEEP):
        yield level
        level = [following for node in level for following, _ in node.next_functions if following is not None]


def keeps_graph() -> bool:
    """Returns True if the running backward keeps its saved tensors (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def gradients_at_once(gradients: Iterable[torch.Tensor | None]) -> int:
    """Returns the number of gradients that each of ``gradients``, which a backward receives, holds; 0 outside of ``vmap``.

    Torch's old ``vmap`` runs batched gradients, as by ``is_grads_batched``. No other one runs compiled code.
    """
    for one in gradients:
        if one is not None and torch._C._functorch.is_legacy_batchedtensor(one):
            count = 1
            for level in range(1, VMAPS_DEEP + 1):
                count *= torch._remove_batch_dim(one, level, 1, 0).shape[0]
            return count
    return 0


def refuses_to_keep_graph(node: Node) -> bool:
    """Returns True if the backward of a compiled graph raises an error when it has to keep its saved tensors.

    Its code may overwrite some of them, which are *donated* to it. Torch compiles code that is made later for what is asked.
    """
    graph = getattr(node, "_forward_cls", None)
    donated = getattr(getattr(graph, "metadata", None), "bw_donated_idxs", None)
    return bool(functorch_config.donated_buffer and getattr(graph, "compiled_bw", None) is not None and donated != [])


@dataclass
class Packed:
    """The bytes of storages that hooks on saved tensors keep on the device in place of what a call saves."""

    copies: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    """The saved tensors themselves."""

    def kept_bytes(self, inputs: Iterable[Any]) -> int:
        """Returns all bytes that the hooks keep, except ``inputs``."""
        known = {storage_key(one) for one in inputs if isinstance(one, torch.Tensor)}
        return sum(self.copies.values()) + sum(size for key, size in self.saved.items() if key not in known)


@contextlib.contextmanager
def noting_packed() -> Iterator[Packed | None]:
    """Yields what the present hooks on saved tensors keep of those that the body saves; None without such hooks."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        yield None
        return
    pack, unpack = hooks
    found = Packed()

    def noting(saved: torch.Tensor) -> Any:
        packed = pack(saved)
        for one in (one for one in tensors_in(packed) if one.device == saved.device):
            kept = found.saved if storage_key(one) == storage_key(saved) else found.copies
            kept[storage_key(one)] = one.untyped_storage().nbytes()
        return packed

    with torch.autograd.graph.saved_tensors_hooks(noting, unpack):
        yield found


def backward_number() -> int | None:
    """Returns a number of the backward that this thread runs; None if it runs none."""
    number = int(torch._C._current_graph_task_id())
    return None if number == -1 else number


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Calls ``callback`` at the end of the running backward."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(untraced(callback))


def call_without_compiling(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of calling ``module`` with its hooks and without what ``module.compile`` installed."""
    call: Any = module._call_impl
    return call(*args, **kwargs)


def install_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Makes ``call`` answer calls of ``module``, as ``module.compile`` does. None undoes that.

    Copies and pickles of the module leave it out.
    """
    installed: Any = module
    installed._compiled_call_impl = call


def retraces_backwards() -> bool:
    """Returns True if compiled autograd traces backwards again, including those of compiled graphs."""
    from torch._dynamo import compiled_autograd, config

    return bool(config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the leaf tensors whose gradients ``tensor.backward()`` would accumulate."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    found: dict[int, torch.Tensor] = {}
    seen, stack = {tensor.grad_fn}, [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if isinstance(node, ACCUMULATES):
            found[id(node.variable)] = node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return list(found.values())


def saved_numbers(node: Node) -> Sequence[int]:
    """Returns the symbolic numbers that a compiled forward saved, as they are in this call."""
    found: Sequence[int] = getattr(node, "symints", ())
    return found


def own_leaves(node: Node) -> list[torch.Tensor]:
    """Returns the leaf tensors to which the backward of ``node`` itself hands gradients."""
    return [following.variable for following, _ in node.next_functions if isinstance(following, ACCUMULATES)]


def hooks_after_gradients(leaf: torch.Tensor) -> list[Callable[..., Any]]:
    """Returns the Python hooks that run after the gradient of ``leaf`` is accumulated.

    Hooks of torch's own data parallelism are not among them.
    """
    return list((leaf._post_accumulate_grad_hooks or {}).values())


@contextlib.contextmanager
def hooks_replaced(leaves: Iterable[torch.Tensor], by: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Has ``by`` called in place of each of the Python hooks that run after a gradient of ``leaves`` is accumulated."""
    found = {id(hooks): hooks for leaf in leaves if (hooks := leaf._post_accumulate_grad_hooks)}
    before = [(hooks, dict(hooks)) for hooks in found.values()]
    for hooks, _ in before:
        hooks.update(dict.fromkeys(hooks, by))
    try:
        yield
    finally:
        for hooks, own in before:
            hooks.update(own)


def is_optimized(module: torch.nn.Module) -> bool:
    """Returns True if the module is a result of ``torch.compile``."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule)


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns True if the module comes from ``torch.compile`` or its call was compiled by ``module.compile``."""
    return is_optimized(module) or module._compiled_call_impl is not None
