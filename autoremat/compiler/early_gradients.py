"""Graphs that are compiled in parts, so that hooks on gradients run between the backwards of the parts.

The backward of a compiled graph hands over all gradients at its end. Parts are chained autograd nodes: gradients of a later
part leave before the backward of an earlier one begins. An optimizer in the backward then frees them there.
``split_budget.py`` shares one budget among the parts.
"""

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import BudgetWarning, OptimizerUnpredictable, OptionWarning
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.compiler.lowering import Compiled
from autoremat.device_memory.inventory import live_optimizers, optimizer_memory, parameters_of
from autoremat.options.options import Options
from autoremat.planner.memory.allocations import ROUNDING
from autoremat.request.budgets import is_profile
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private import autograd, compilers, higher_order, split_graphs
from autoremat.torch_private.dynamo import nesting_of, sharded_inputs, switches_autocast
from autoremat.torch_private.hooks import around_backward
from autoremat.torch_private.split_graphs import GradientHooks
from autoremat.torch_private.tensors import storage_bytes, storage_key

PARTS = 4
"""The number of parts if the options give none: more of them free gradients earlier, and each costs a call and ends fusion."""

UNDER_FULLY_SHARD = (
    "fully_shard reduces the gradients of this graph together, after its whole backward, and hooks on the shards run then. "
    "fully_shard of each layer reduces them layer by layer"
)

UNCUT = (
    "this graph cannot be cut: it has at most one parameter that requires a gradient, or a tensor that changes in place, or "
    "that is none of torch's, lives throughout"
)


def compiled_in_parts(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    around: Surroundings,
    patches: Mapping[str, Any],
    compile_part: Callable[[fx.GraphModule, Sequence[Any]], Compiled],
) -> Compiled | None:
    """Returns a graph that Dynamo captured, with each of its parts compiled by ``compile_part``; None if it stays whole.

    Warns with ``OptionWarning`` if the options ask for parts, or say what hooks do, and that has no effect.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    hooked = {n.name: t for n, t in zip(placeholders, inputs, strict=True) if _is_hooked(t)}
    trained = {position for position, tensor in enumerate(inputs) if _is_trained(tensor)}
    reason = ""
    if trained and not hooked and trained <= sharded_inputs(gm):
        reason = UNDER_FULLY_SHARD
    elif is_profile(options):
        reason = "a step profile knows whole graphs. Leave one of them out"
    elif split_graphs.is_split():
        reason = "DistributedDataParallel splits this graph into buckets already; bucket_cap_mb=... sizes them"
    if options.hooks_free_gradients and trained and not hooked:
        none = "no parameter of this graph has a post-accumulate-grad hook"
        warn_user(f"hooks_free_gradients has no effect: {reason or none}", OptionWarning)
    wanted = options.early_gradients
    if wanted == "auto":
        is_whole = around.why_broken is None and around.block is None and not options.open_calls.sends_gradients
        wanted = bool(hooked) and is_whole and not options.plan and options.max_slowdown is None
    count = (PARTS if wanted else 1) if isinstance(wanted, bool) else int(wanted)
    part_of: Mapping[fx.Node, int] = {}
    if count > 1 and not reason:
        if not compilers.keeps_dead_draws(patches):
            remove_dead_code(gm)
        part_of = divided(gm, inputs, around.device.type, count)
        reason = "" if any(part_of.values()) else UNCUT
    if count > 1 and reason and options.early_gradients != "auto":
        warn_user(f"early_gradients has no effect: {reason}", OptionWarning)
    has_hooks = bool(hooked) and options.memory_budget is not None
    if count == 1 or reason:
        if has_hooks and reason in ("", UNCUT):
            _warn_of_hooks(hooked.values(), around.device)
        return None
    freed = hooked if options.hooks_free_gradients else {}
    hooks = _hooks(freed.keys(), hooked.values(), around.device) if has_hooks else GradientHooks()
    return split_graphs.compile_parts(gm, inputs, part_of, compile_part, hooks)


def _is_trained(tensor: Any) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad


def _is_hooked(tensor: Any) -> bool:
    return _is_trained(tensor) and bool(autograd.hooks_after_gradients(tensor))


def _warn_of_hooks(parameters: Collection[torch.Tensor], device: torch.device) -> None:
    """Warns of optimizers that step in hooks after the backward of a whole graph, where their memory does not count."""
    hooks = _hooks((), parameters, device)
    if hooks.bytes:
        warn_user(
            f"hooks run after the backward of this graph, with all gradients live. A step of an optimizer in a hook allocates "
            f"up to {format_bytes(hooks.bytes)} beside them, so the step may exceed memory_budget. early_gradients=True runs "
            "the hooks between parts of the graph, and counts that",
            BudgetWarning,
        )


def _hooks(freed: Collection[str], parameters: Collection[torch.Tensor], device: torch.device) -> GradientHooks:
    """Returns what is known of the hooks on ``parameters``.

    Optimizers of some of these parameters alone are taken to step in the hooks.
    """
    hooked = {id(parameter) for parameter in parameters}
    stepping = [one for one in live_optimizers(device) if hooked.issuperset(map(id, parameters_of([one])))]
    found = GradientHooks(
        frozenset(freed),
        note="gradients count as freed by the hooks" if freed else "gradients count as kept, although hooks may free them",
        are_unknown=not freed,
    )
    try:
        memory = optimizer_memory(stepping, device.type, ROUNDING if device.type == "cuda" else 1) if stepping else None
    except OptimizerUnpredictable:
        memory = None
    if memory is None:
        return replace(found, note=f"{found.note}; memory that the hooks allocate is unknown and does not count")
    more = max(0, (memory.later_step_bytes or 0) - memory.state_bytes)
    state = memory.state_bytes - memory.existing_bytes
    note = f"{found.note}; a step of an optimizer in a hook allocates up to {format_bytes(more)}, which count"
    note += f". State of {format_bytes(state)}, which the hooks allocate in the first step, comes on top" if state else ""
    return replace(found, bytes=more, note=note)


def checked(function: Compiled, inputs: Sequence[Any], options: Options) -> Compiled:
    """Returns a compiled graph that warns once if gradients that count as freed stay at the end of one of its backwards."""
    freed = [weakref.ref(tensor) for tensor in inputs if options.hooks_free_gradients and _is_hooked(tensor)]
    if not freed or options.memory_budget is None:
        return function
    count = len(freed)

    def look() -> None:
        left = [p for p in (reference() for reference in freed) if p is not None and p.grad is not None]
        if left:
            freed.clear()
            warn_user(
                f"hooks_free_gradients=True, but the hooks leave {len(left)} of {count} gradients after a backward, of "
                f"{format_bytes(sum(p.nbytes for p in left))} together (the first has the shape {tuple(left[0].shape)}): the "
                "step may exceed memory_budget by as much. Let each hook set .grad to None, or set hooks_free_gradients=False",
                BudgetWarning,
            )

    def call(*args: Any) -> Any:
        outputs = function(*args)
        node = autograd.backward_node(outputs, args)
        if node is not None:
            around_backward(node, ends=lambda *_: autograd.when_backward_ends(look))
        return outputs

    return call


# -- the places of the cuts, into parts of about equal bytes of parameters ---------------------------------------------------


WINDOW = 0.25
"""The share of a part by which a cut may miss the place of equal parts, for fewer bytes across it."""


def divided(module: fx.GraphModule, inputs: Sequence[Any], device_type: str, count: int) -> dict[fx.Node, int]:
    """Returns the part of each node, from 0, of a graph in at most ``count`` parts of about equal bytes of parameters.

    Each part is the first to read some of the parameters that require gradients, so these gradients leave after its backward.
    There are fewer parts than ``count`` if there are fewer places to cut, and one if there is none.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    number = {node: i for i, node in enumerate(nodes)}
    arriving = [0] * len(nodes)  # bytes of parameters that the node is the first to read
    for node, tensor in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        readers = [number[user] for user in node.users if user in number]
        if readers and _is_trained(tensor):
            arriving[min(readers)] += storage_bytes(tensor, device_type)
    arrived = list(accumulate(arriving))
    crossing = _crossing_bytes(module, nodes, device_type)
    whole = arrived[-1] if arrived else 0
    # A cut before node ``i`` leaves ``arrived[i - 1]`` bytes of parameters to the parts before it.
    allowed = {i: size for i, size in enumerate(crossing) if size is not None and i and 0 < arrived[i - 1] < whole}

    def rank(place: int, ideal: float) -> tuple[bool, float, float]:
        miss, size = abs(arrived[place - 1] - ideal), allowed[place]
        is_far = miss > WINDOW * whole / count
        return (True, miss, size) if is_far else (False, size, miss)

    cuts: dict[int, int] = {}
    for part in range(1, count) if allowed else ():
        place = min(allowed, key=lambda i: rank(i, part * whole / count))
        cuts.setdefault(arrived[place - 1], place)
    places = sorted(cuts.values())
    return {node: bisect_right(places, i) for i, node in enumerate(nodes)}


def _crossing_bytes(module: fx.GraphModule, nodes: Sequence[fx.Node], device_type: str) -> list[int | None]:
    """Returns, for each of ``nodes``, the bytes of the results that a cut before it would cross; None if none may be there.

    Views cross with their base. A tensor that changes in place stays within a part: a plan may save it before the change, where
    eager code would not.
    """
    place = {node: i for i, node in enumerate(nodes)}
    touched, sizes = defaultdict[int, list[int]](list), defaultdict[int, list[int | None]](list)
    for node in module.graph.nodes:
        value, places = node.meta.get("example_value"), [place[one] for one in (node, *node.users) if one in place]
        if node.op in ("get_attr", "output") or switches_autocast(node) or isinstance(value, torch.SymInt | int):
            continue  # torch repeats these in each part, or hands them over
        if isinstance(value, torch.Tensor) and places:
            touched[storage_key(value)] += places
            size = 0 if node.op == "placeholder" else storage_bytes(value, device_type)
            sizes[storage_key(value)].append(None if value._version else size)
        elif node in place and not isinstance(value, torch.Tensor):
            touched[id(node)], sizes[id(node)] = places, [None]
    more, refused = [0] * (len(nodes) + 1), [0] * (len(nodes) + 1)
    for key, places in touched.items():
        known = [size for size in sizes[key] if size is not None]
        changed, by = (more, min(known)) if len(known) == len(sizes[key]) else (refused, 1)
        if min(places) < max(places):
            changed[min(places) + 1] += by
            changed[max(places) + 1] -= by
    depths = accumulate(map(nesting_of, nodes), initial=0)  # inside of a transform of torch.func, state is live
    found = zip(accumulate(more), accumulate(refused), depths, strict=True)
    return [None if number or depth else size for size, number, depth in found][: len(nodes)]


# -- the nodes that AOTAutograd would drop from the graph as a whole -------------------------------------------------------


# Dynamo's graph is not functional: a node that nobody reads may still change a tensor that others read, or have another effect.
# A cut would turn a dead node into a result that a part hands over.

OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)

RUNNING_STATISTICS = ("batch_norm", "instance_norm")
"""Parts of the names of functions that change inputs, which torch does not count as changes in place."""

MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")
"""Names of functions that switch modes. A body switches them back at its end."""


def remove_dead_code(module: fx.GraphModule) -> None:
    """Removes the nodes of a captured graph that neither its results nor its effects need."""
    live = live_nodes(module.graph)
    for node in reversed(module.graph.nodes):
        if node not in live:
            module.graph.erase_node(node)
    module.recompile()


def live_nodes(graph: fx.Graph, returns: bool = True) -> set[fx.Node]:
    """Returns the nodes that results and effects of a captured graph need; the effects alone unless it ``returns``.

    A node that changes a tensor is live if that tensor's storage is an input's, or if a later live node touches it.
    """
    live = {node for node in graph.nodes if node.op == "placeholder" or (returns and node.op == "output")}
    storages = {key for node in graph.nodes if node.op in ("placeholder", "get_attr") for key in _storages([node])}
    inputs = frozenset(storages)
    for node in reversed(graph.nodes):
        read = node.op != "output" and not live.isdisjoint(node.users)
        if node in live or read or (node.op != "output" and _acts(node, inputs, storages)):
            live.add(node)
            storages |= _storages([node, *node.all_input_nodes])
    return live


def _acts(node: fx.Node, inputs: frozenset[int], storages: set[int]) -> bool:
    """Returns True if the node has an effect beside its results, or may change one of ``storages``, ``inputs`` among them."""
    if node.op == "get_attr":
        return False
    if getattr(node.target, "__name__", "") == "setitem":
        return not storages.isdisjoint(_storages(node.all_input_nodes[:1]))
    if node.op == "call_module" or not _results(node):
        return True
    if isinstance(node.target, OPS) and node.is_impure(impure_random=False):
        return True
    needed = (one for body in higher_order.bodies(node) for one in live_nodes(body.graph, returns=False))
    if any(one.op != "placeholder" and getattr(one.target, "__name__", "") not in MODES for one in needed):
        return True
    if any(name in getattr(node.target, "__name__", str(node.target)) for name in RUNNING_STATISTICS):
        trained = {n for n in node.all_input_nodes for one in _results(n) if getattr(one, "requires_grad", False)}
        return not inputs.isdisjoint(_storages(n for n in node.all_input_nodes if n not in trained))
    changed = _storages(node.all_input_nodes, changed=True)
    return not (changed & inputs).isdisjoint(storages) or not (changed & _storages([node])).isdisjoint(storages)


def _results(node: fx.Node) -> list[Any]:
    """Returns the tensors and numbers that a node of a captured graph makes."""
    value = node.meta.get("example_value")
    return [one for one in torch.utils._pytree.tree_leaves(value) if one is not None]


def _storages(nodes: Iterable[fx.Node], changed: bool = False) -> set[int]:
    """Returns the storages of the results of ``nodes``; of those alone that the graph changes in place if ``changed``."""
    tensors = (one for one in chain.from_iterable(map(_results, nodes)) if isinstance(one, torch.Tensor))
    return {storage_key(tensor) for tensor in tensors if tensor._version or not changed}
