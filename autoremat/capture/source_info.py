"""Where a node comes from: the modules that were running, the line of source, the op of the model, the name of its result."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch import fx

from autoremat.planner.graph.graph import Scope
from autoremat.report.text_tables import short_source
from autoremat.torch_private import compat

NAMES = "autoremat_names"
"""Key in ``node.meta["custom"]``, which AOTAutograd hands on: the call of the model that a node belongs to, and the names that
the model gives its result."""

ROOT = re.compile(r"^([LG]\['(\w+)'\]|\.__closure__\[\d+\]\.cell_contents|\.__self__|\.func|\.args\[\d+\])+")
"""How Dynamo says where it found the model: an argument, a global or what a function closes over."""

UNNAMED = ("self", "model", "fn")
"""Variables that say nothing of which model a path belongs to."""


@cache
def _path(name: str) -> str:
    """Dynamo's name of a module, such as ``L['self'].model.layers[0]``, as its owner would write it. Begins with the variable
    that holds the model, where that has a name of its own."""
    root = ROOT.match(name)
    rest = name[root.end() :] if root is not None else name
    rest = re.sub(r"\[(['\"]?)([^'\"\]]+)\1\]", r".\2", rest.replace("._modules", "")).lstrip(".")
    return rest if root is None or root[2] is None or root[2] in UNNAMED else f"{root[2]}.{rest}".rstrip(".")


def scopes(node: fx.Node) -> tuple[Scope, ...]:
    """The modules that were running when the node was traced, outermost first; without those of an empty path."""
    found = []
    for key, (name, kind) in node.meta.get("nn_module_stack", {}).items():
        _, again, call = str(key).rpartition("@")  # an address, which differs between processes, and "@2" at the third call
        kind = kind if isinstance(kind, str) else kind.__qualname__
        path = _path(name)
        if path:
            found.append(Scope(path, kind.rpartition(".")[2], int(call) if again else 0))
    return tuple(found)


def origin(node: fx.Node) -> tuple[str, str]:
    """(module path, "file:line") of a node, empty where unknown; what autograd made has its forward's."""
    module = ""
    for path, _ in (node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}).values():
        module = path
    module = ROOT.sub("", module.replace("._modules", "")).lstrip(".")
    source = ""
    for line in (node.meta.get("stack_trace") or "").splitlines():
        if line.strip().startswith("File "):
            parts = line.strip().split(",")
            source = f"{parts[0][len('File ') :].strip(chr(34))}:{parts[1].strip().removeprefix('line ')}"
    return module, source


def decomposed_from(node: fx.Node) -> str:
    """The target of the op that the node is part of, empty if it is that op."""
    original: Any = node.meta.get("original_aten")
    return "" if original is None or original is node.target else str(original)


def names(node: fx.Node) -> tuple[str, tuple[str, ...]]:
    """The call of the model that the node belongs to, and what its result is named there; empty if it has no name."""
    found: tuple[str, tuple[str, ...]] = node.meta.get("custom", {}).get(NAMES, ("", ()))
    return found


def take_names(gm: fx.GraphModule) -> None:
    """Remove ``torch.ops.autoremat.named`` from Dynamo's graph and from the graphs in it; the node that makes the storage of a
    named tensor gets a note instead."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and any(_gives_name(node) for node in module.graph.nodes):
            _take_from(module)
            module.recompile()


def _gives_name(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target) in ("autoremat.named", "autoremat.named.default")


def _take_from(module: fx.GraphModule) -> None:
    makers: dict[int | None, fx.Node] = {}
    for node in list(module.graph.nodes):
        if _gives_name(node):
            given: dict[str, Any] = {**dict(zip(("tensor", "name"), node.args, strict=False)), **node.kwargs}
            tensor = given["tensor"]
            maker = makers.get(_storage(tensor), tensor)
            _, earlier = names(maker)
            maker.meta["custom"] = {**maker.meta.get("custom", {}), NAMES: (maker.name, (*earlier, given["name"]))}
            node.replace_all_uses_with(tensor)
            module.graph.erase_node(node)
        elif _storage(node) is not None:
            makers.setdefault(_storage(node), node)


def _storage(node: fx.Node) -> int | None:
    """What identifies the storage of a node's tensor; None if it has no tensor."""
    tensor = node.meta.get("example_value")
    return compat.storage_key(tensor) if isinstance(tensor, torch.Tensor) else None


def identity(gm: fx.GraphModule) -> str:
    """Text that changes with anything that orders may point at and the graph's own text does not show."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return repr([(scopes(node), names(node)) for graph in graphs for node in graph.nodes])


def begin_of(graph: fx.Graph) -> str:
    """Where the code of a graph begins, in few words."""
    sources = (origin(node)[1] for node in graph.nodes if node.op != "placeholder")
    source = next(filter(None, sources), "")
    return f"the graph at {short_source(source)}" if source else "a graph"


def place_of(graph: fx.Graph) -> str:
    """Where the code of a graph begins and ends, for people."""
    sources = [source for node in graph.nodes if node.op != "placeholder" and (source := origin(node)[1])]
    return f"from {sources[0]} to {sources[-1]}" if sources else "of unknown origin"
