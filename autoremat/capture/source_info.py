"""The origin of a node: the running modules, the source line, the model's op, and the names of its result.

A graph is known again in another compilation by a hash of its computation alone.
"""

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autoremat.basics.display import short_source
from autoremat.basics.units import format_bytes
from autoremat.planner.graph.op import Scope
from autoremat.torch_private import symbolic_sizes
from autoremat.torch_private.symbolic_sizes import size_hint
from autoremat.torch_private.tensors import storage_key

NAMES = "autoremat_names"
"""The key in ``node.meta["custom"]`` of the model's call that a node belongs to, and of its result's names.

AOTAutograd preserves this metadata.
"""

ROOT = re.compile(r"^([LG]\['(\w+)'\]|\.__closure__\[\d+\]\.cell_contents|\.__self__|\.func|\.args\[\d+\])+")
"""Matches Dynamo's reference to the model: an argument, a global or a closure variable."""

PACKAGE = str(Path(__file__).parent.parent)
"""Folder of this package, whose lines are never those of the model."""

INSTALLED = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\]")
"""Matches the folder of installed packages. A line of one has a path within it, such as ``torch/nn/functional.py``."""

UNNAMED = ("self", "model", "fn")
"""Variable names that do not identify a model."""


@cache
def _path(name: str) -> str:
    """Returns Dynamo's name of a module, such as ``L['self'].model.layers[0]``, as its owner would write it."""
    root = ROOT.match(name)
    rest = name[root.end() :] if root is not None else name
    rest = re.sub(r"\[(['\"]?)([^'\"\]]+)\1\]", r".\2", rest.replace("._modules", "")).lstrip(".")
    return rest if root is None or root[2] is None or root[2] in UNNAMED else f"{root[2]}.{rest}".rstrip(".")


def scopes(node: fx.Node) -> tuple[Scope, ...]:
    """Returns the modules that were running when the node was traced, outermost first, without those of an empty path."""
    found = []
    for key, (name, kind) in node.meta.get("nn_module_stack", {}).items():
        _, again, call = str(key).rpartition("@")  # an address, which differs between processes; then "@2" at the third call
        kind = kind if isinstance(kind, str) else kind.__qualname__
        path = _path(name)
        if path:
            found.append(Scope(path, kind.rpartition(".")[2], int(call) if again else 0))
    return tuple(found)


def origin(node: fx.Node) -> tuple[str, str]:
    """Returns (module path, "file:line") of a node, each empty if unknown.

    A node of autograd has the module path of its forward op.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {"": ("", "")}
    module = ROOT.sub("", [*stack.values()][-1][0].replace("._modules", "")).lstrip(".")
    source = ""
    for line in (node.meta.get("stack_trace") or "").splitlines():
        if line.strip().startswith("File "):
            parts = line.strip().split(",")
            file = parts[0][len("File ") :].strip(chr(34))
            if not file.startswith(PACKAGE):  # ``compile_blocks`` calls the blocks
                source = f"{INSTALLED.sub('', file)}:{parts[1].strip().removeprefix('line ')}"
    return module, source


def decomposed_from(node: fx.Node) -> str:
    """Returns the target of the op that was decomposed into the node; empty if the node is that op."""
    original: Any = node.meta.get("original_aten")
    return "" if original is None or original is node.target else str(original)


def names(node: fx.Node) -> tuple[str, tuple[str, ...]]:
    """Returns the model's call that the node belongs to, and the names of that call's result; empty if it has no name."""
    found: tuple[str, tuple[str, ...]] = node.meta.get("custom", {}).get(NAMES, ("", ()))
    return found


def take_names(gm: fx.GraphModule) -> None:
    """Removes ``torch.ops.autoremat.named`` from Dynamo's graph and its nested graphs.

    The names move to the metadata of the node that allocates the named tensor's storage.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and any(_gives_name(node) for node in module.graph.nodes):
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
            module.recompile()


def _gives_name(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target) in ("autoremat.named", "autoremat.named.default")


def _storage(node: fx.Node) -> int | None:
    """Returns a number that identifies the storage of a node's tensor; None if it has no tensor."""
    tensor = node.meta.get("example_value")
    return storage_key(tensor) if isinstance(tensor, torch.Tensor) else None


def identity(gm: fx.GraphModule) -> str:
    """Returns text that changes with scopes and names, which constraints refer to and the graph's own text does not show."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return repr([(scopes(node), names(node)) for graph in graphs for node in graph.nodes])


def beside_the_loss(module: fx.GraphModule) -> tuple[str, int]:
    """Returns what Dynamo's graph returns beside a scalar loss, in a sentence with advice, and its bytes; "", 0 for nothing."""
    returned: Any = module.graph.output_node().args[0]
    tensors = {node: node.meta.get("example_value") for node in returned if isinstance(node, fx.Node)}
    found = {node: tensor for node, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    sizes = {node: size_hint(tensor.numel()) * tensor.element_size() for node, tensor in found.items() if tensor.dim()}
    if len(sizes) == len(found) or not sizes:
        return "", 0
    caches = [node for node in sizes if "cache_utils.py" in (node.meta.get("stack_trace") or "")]
    names = [f"{node.name} ({format_bytes(size)})" for node, size in sizes.items() if node not in caches]
    if caches:
        names.append(f"a cache of {len(caches)} tensors ({format_bytes(sum(map(sizes.__getitem__, caches)))})")
    set_what = "set use_cache=False, and " if caches else ""
    return (
        f"the compiled function returns more than its loss: {', '.join(names)}, which stay live until the backward ends: "
        f"{set_what}return the loss alone"
    ), sum(sizes.values())


def begin_of(graph: fx.Graph) -> str:
    """Returns a short description of the place where a graph's code begins."""
    sources = (origin(node)[1] for node in graph.nodes if node.op != "placeholder")
    source = next(filter(None, sources), "")
    return f"the graph at {short_source(source)}" if source else "a graph"


def place_of(graph: fx.Graph) -> str:
    """Returns a description of the places where a graph's code begins and ends."""
    sources = [source for node in graph.nodes if node.op != "placeholder" and (source := origin(node)[1])]
    return f"from {sources[0]} to {sources[-1]}" if sources else "of unknown origin"


def graph_key(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Returns a hash of the graph's ops and of the sizes, types and devices of its inputs.

    Names and source lines are left out, because they depend on the function around the graph.
    """
    numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        target: Any = "" if node.op in ("placeholder", "output", "get_attr") else node.target
        if not isinstance(target, str):
            target = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        lines.append(f"{node.op} {target} {arguments if node.op != 'placeholder' else ''}")
    lines += map(_sizes_and_type, inputs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sizes_and_type(value: Any) -> str:
    """Returns the properties of an input that the plans of its graph depend on, as text."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    hints = [symbolic_sizes.size_hint(size) for size in value.shape]
    return f"{hints} {value.dtype} {value.device} {value.requires_grad}"
