"""Torch's private names for Dynamo: what it notes beside a captured graph, graph breaks and skipped frames."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import register_backend as register_backend
from torch._dynamo.utils import counters, graph_break_reasons
from torch._guards import CompileContext

from autoremat.basics.display import short_source
from autoremat.basics.units import rounded
from autoremat.planner.memory.allocations import ROUNDING
from autoremat.torch_private.frames import RESUMED, above_dynamo, line_of_user
from autoremat.torch_private.hooks import is_untraced, untraced
from autoremat.torch_private.symbolic_sizes import size_hint
from autoremat.torch_private.tensors import storage_key

BY_DDP = "DDPOptimizer intentional graph-break"
"""The begin of the reason by which torch marks a bucket of ``DistributedDataParallel`` as broken off."""

STATIC_INPUT = "_dynamo_static_input_type"
"""A key of the placeholders of parameters and buffers, whose addresses never change."""

WITHOUT_RNN = "RNN, GRU, or LSTM"
"""A phrase in the reason of a graph break at a module that Dynamo traces only with ``allow_rnn``."""

OPENS_GRADIENT = torch._C._functorch._grad_increment_nesting.__name__
"""The name of the call in a captured graph that begins a gradient of ``torch.func``: grad, vjp and what uses them."""

CONTAINERS = "torch/nn/modules/container.py"
"""The end of the path of modules that call others in sequence, as a user's do."""

SOURCES_OF_MODULE = (
    "_param_name_to_source",
    "_source_to_user_stacks",
)
"""Attributes of a captured graph module. Copies of the module lack them."""

SOURCE_OF_INPUT = "_dynamo_source"
"""An attribute of the placeholders of a captured graph. Copies of the graph lack it."""


def copied_with_sources(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a captured graph module, with the sources of its inputs.

    By the sources, AOTAutograd knows parameters and buffers. CUDA graphs read these in place, and copy all other inputs.
    """
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    copied.meta = dict(module.meta)
    for name in SOURCES_OF_MODULE:
        if hasattr(module, name):
            setattr(copied, name, getattr(module, name))
    inputs = (m.graph.find_nodes(op="placeholder") for m in (module, copied))
    for original, placeholder in zip(*inputs, strict=True):
        if hasattr(original, SOURCE_OF_INPUT):
            setattr(placeholder, SOURCE_OF_INPUT, getattr(original, SOURCE_OF_INPUT))
    return copied


def sharded_inputs(module: fx.GraphModule) -> frozenset[int]:
    """Returns the positions of the inputs of a captured graph that are parameters of modules under ``fully_shard``.

    Dynamo's sources show it, unless ``torch._dynamo.config.skip_fsdp_guards`` is off.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    return frozenset(i for i, node in enumerate(placeholders) if _is_sharded(getattr(node, SOURCE_OF_INPUT, None)))


def number_of_function() -> int | None:
    """Returns the number of the function that Dynamo compiles now, which its recompilations share; None outside of Dynamo.

    Torch counts anew after a reset.
    """
    number = CompileContext.current_compile_id()
    return None if number is None else number.frame_id


def passed_bytes(module: fx.GraphModule, inputs: Sequence[Any], device: torch.device, is_cuda: bool) -> int:
    """Returns the bytes of the storages on ``device`` that a captured graph is passed, beside parameters and buffers.

    ``is_cuda`` is True if the device is CUDA's, whose allocator rounds each storage up, or stands for one.
    """
    found, rounding = {}, ROUNDING if is_cuda else 1
    for node, tensor in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        is_static = STATIC_INPUT in (node.meta.get("tensor_dict") or {}) or isinstance(tensor, torch.nn.Parameter)
        if isinstance(tensor, torch.Tensor) and tensor.device == device and not is_static:
            found[storage_key(tensor)] = rounded(size_hint(tensor.untyped_storage().nbytes()), rounding)
    return sum(found.values())


def _is_sharded(source: Any) -> bool:
    from torch._dynamo import source as sources

    chain = []
    while source is not None:
        chain.append(source)
        source = getattr(source, "base", None)
    is_parameter = any(getattr(one, "member", None) == "_parameters" for one in chain)
    return is_parameter and any(isinstance(one, sources.FSDPNNModuleSource) for one in chain)


def graph_breaks() -> Counter[str]:
    """Returns the reasons of all graph breaks in this process, each with its count."""
    return Counter(counters["graph_break"])


def in_few_words(reason: str, line: str = "") -> str:
    """Returns a graph break's reason in one line, with the user's ``line``, by default of the latest such break, and a hint."""
    stacks = (one.user_stack for one in reversed(graph_break_reasons) if one.reason == reason)
    place = short_source(line or line_of_user(next(stacks, [])))
    lines = [text.strip() for text in reason.strip().splitlines()]
    said = [text.partition(": ")[2] for kind in ("Explanation: ", "Hint: ") for text in lines if text.startswith(kind)][:2]
    return ". ".join(text.rstrip(".") for text in (f"{lines[0]}, at {place}" if place else lines[0], *said) if text)


def graph_break_around(gm: fx.GraphModule) -> str | None:
    """Returns the reason of the graph break after ``gm``; None if ``gm`` is the whole function, or a bucket of it.

    The result is empty if ``gm`` is the last part of a broken function: the reason is known for an earlier part.
    """
    ended = getattr(gm, "compile_subgraph_reason", None)
    if ended is not None and ended.graph_break:
        if str(ended.reason).startswith(BY_DDP):  # buckets share one budget
            return None
        if ended.reason == "step_unsupported":  # the break is inside of a call, and its reason the one before in the list
            ended = next((one for one in reversed(graph_break_reasons) if one.reason != ended.reason), ended)
        return str(ended.reason)
    resumed = any(RESUMED in (node.meta.get("stack_trace") or "") for node in gm.graph.nodes)
    return "" if resumed else None


def computes_gradients(module: fx.GraphModule) -> bool:
    """Returns True if a captured graph differentiates: by ``torch.func``, or by ``torch.autograd.grad``."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return torch.autograd.grad in targets or OPENS_GRADIENT in (getattr(target, "__name__", "") for target in targets)


def asks_to_restart(error: BaseException) -> bool:
    """Returns True if torch raises ``error`` to have Dynamo trace the function again, which is no failure."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def switches_autocast(node: fx.Node) -> bool:
    """Returns True if a node of a captured graph begins or ends a region of autocast."""
    autocast = torch.amp.autocast_mode
    return node.target in (autocast._enter_autocast, autocast._exit_autocast)


def nesting_of(node: fx.Node) -> int:
    """Returns 1 if a node of a captured graph begins a transform of ``torch.func``, -1 if it ends one, 0 otherwise."""
    name = getattr(node.target, "__name__", "")
    return name.endswith("increment_nesting") - name.endswith("decrement_nesting")


def requires_gradient(module: fx.GraphModule) -> bool:
    """Returns True if a result of a captured graph depends on something that requires a gradient, or if that is unknown."""
    results = [node.meta.get("example_value") for node in module.graph.output_node().all_input_nodes]
    return any(one is None or (isinstance(one, torch.Tensor) and one.requires_grad) for one in results)


def runs_in_transform() -> bool:
    """Returns True inside of a transform of ``torch.func``, where Dynamo compiles nothing."""
    return torch._C._functorch.peek_interpreter_stack() is not None


BETWEEN = "/torch/", "/contextlib.py", "/torch_private/"
"""Parts of the names of files whose functions may run between Dynamo and the wrapper of ``torch.compile``."""


def is_called_by_a_broken_function() -> bool:
    """Returns True if the function that Dynamo compiles now is called by one that runs: Dynamo broke that, or left it alone.

    A function that is compiled as a whole is called by the wrapper of ``torch.compile``, with other code of torch between them
    at most, such as that of distributed modules.
    """
    for frame in above_dynamo():
        file, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        if file.endswith("_dynamo/eval_frame.py") and name in ("compile_wrapper", "_fn"):
            return False
        if file.endswith(CONTAINERS) or not any(part in file for part in BETWEEN):
            return True
    return False


def around_each_frame(begins: Callable[..., None], ended: Callable[..., None]) -> None:
    """Calls ``begins`` before Dynamo looks at a frame and ``ended`` after it, with what Dynamo says, until torch is reset.

    Repeated registration has no effect.
    """
    from torch._dynamo.callback import callback_handler

    for callbacks, listener in ((callback_handler.start_callbacks, begins), (callback_handler.end_callbacks, ended)):
        if not any(is_untraced(callback, listener) for callback in callbacks):
            callbacks.append(untraced(listener))


_resets = 0


def _mark(*_: object) -> None:
    """A callback without effect that Dynamo calls around each frame. A reset of torch removes it, which shows the reset."""


def resets() -> int:
    """Returns the number of resets of torch so far. Each drops everything that is compiled, and functions are numbered anew."""
    global _resets
    from torch._dynamo.callback import callback_handler

    if not any(is_untraced(callback, _mark) for callback in callback_handler.start_callbacks):
        around_each_frame(_mark, _mark)
        _resets += 1
    return _resets
