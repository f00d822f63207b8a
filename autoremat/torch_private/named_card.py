"""Torch's private names for tracing and lowering for a CUDA device that is not here: a card that is known by its data sheet.

Without a CUDA device, autograd and many functions refuse even fake CUDA tensors. Tensors of the CPU therefore stand for those
of the card until Inductor lowers a graph. The graph then moves to the card, and the data sheet answers Inductor's questions.

Torch asks for the type of a device to decide how it writes an op as other ops, and which patterns of ops it replaces. A plan
that is made without the card fits the graph on the card only if both have the same ops. Decompositions and patterns therefore
find the card. The ops that they call find the CPU.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autoremat.planner.cost.datasheets import Datasheet, device_memory
from autoremat.torch_private.hooks import Method, held, hooked, substituted

CARD = torch.device("cuda", 0)
CPU = torch.device("cpu")

_finds_card: ContextVar[bool] = ContextVar("autoremat_finds_card", default=False)
"""True where this thread finds the tensors of the CPU on the card."""


@contextlib.contextmanager
def traced_as_on_card(attention: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Makes torch trace tensors of the CPU as those of a card: decompositions and patterns act as there, while active.

    Inductor writes ``attention`` where it recognises an attention of single ops.
    """
    from torch._inductor.fx_passes import fuse_attention, joint_graph
    from torch._inductor.pattern_matcher import PatternMatcherPass
    from torch.fx.experimental import proxy_tensor

    def decompose_on_card(decompose: Method, *arguments: Any) -> Any:
        with held(_finds_card, True), _OpsOnCpu():  # type: ignore[no-untyped-call]
            return decompose(*arguments)

    def convert_on_cpu(from_tensor: Method, *arguments: Any, **keywords: Any) -> Any:
        with held(_finds_card, False):
            return from_tensor(*arguments, **keywords)

    def found_device(device: Method, tensor: FakeTensor) -> torch.device:
        found: torch.device = device(tensor)
        return CARD if _finds_card.get() and found.type == CPU.type else found

    with (
        substituted(fuse_attention, "_scaled_dot_product_attention", attention),
        hooked(FakeTensor, "device", found_device),
        substituted(FakeTensor, "is_cuda", lambda tensor: tensor.device.type == CARD.type),
        hooked(proxy_tensor, "maybe_handle_decomp", decompose_on_card),
        substituted(joint_graph, "get_gpu_type", lambda: CARD.type),
        hooked(FakeTensorMode, "from_tensor", convert_on_cpu),
        hooked(PatternMatcherPass, "apply", _replace_on_card),
    ):
        yield


class _OpsOnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs ops as on the CPU, while their caller finds the tensors of the CPU on the card."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with held(_finds_card, False):
            args, kwargs = tree_map(_on_cpu, (args, kwargs or {}))
            return op(*args, **kwargs)


def _replace_on_card(apply: Method, patterns: Any, graph: fx.GraphModule | fx.Graph) -> int:
    """Returns the number of replacements by ``patterns`` in ``graph``, whose nodes name the card meanwhile."""
    nodes = (graph.graph if isinstance(graph, fx.GraphModule) else graph).nodes
    if any(isinstance(node.meta.get("val"), FakeTensor) and node.meta["val"].device.type == CARD.type for node in nodes):
        return int(apply(patterns, graph))  # it was moved to the card
    _name_devices(nodes, on_card)
    try:
        with held(_finds_card, True), _OpsOnCpu():  # type: ignore[no-untyped-call]
            return int(apply(patterns, graph))
    finally:
        _name_devices(nodes, _on_cpu)


def _name_devices(nodes: Any, named: Callable[[Any], Any]) -> None:
    for node in nodes:
        node.args = fx.node.map_aggregate(node.args, named)
        node.kwargs = fx.node.map_aggregate(node.kwargs, named)


def on_card(argument: Any) -> Any:
    """Returns the card for a device that is the CPU; anything else as it is."""
    return CARD if isinstance(argument, torch.device) and argument.type == CPU.type else argument


def _on_cpu(argument: Any) -> Any:
    return CPU if isinstance(argument, torch.device) and argument.type == CARD.type else argument


HELD = ("val", "example_value")
"""Entries of a node's metadata that hold its tensors."""

WARP = 32
REGISTERS = 65_536
"""Registers of 32 bits per multiprocessor, the same for compute capabilities 7.0 to 12.0."""

THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Most threads of a multiprocessor, by compute capability (CUDA C++ Programming Guide); elsewhere 2048."""

SHARED_KIB = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (12, 0): 99}
"""Most shared memory of a block in KiB, by compute capability (CUDA C++ Programming Guide); elsewhere 227."""


def generates_triton() -> bool:
    """Returns True if Inductor can generate Triton code here, with or without a CUDA device."""
    return importlib.util.find_spec("triton") is not None


# -- graphs ------------------------------------------------------------------------------------------------------------


def move_to_card(graph: fx.GraphModule, inputs: Sequence[object]) -> Sequence[object]:
    """Returns ``inputs`` as tensors of the card, and moves ``graph`` there in place, nested graphs included.

    Fake tensors of the CPU become fake tensors of the card, and those that share memory still do. Constants keep their data on
    the CPU. Those with dimensions are copied to the card where they are read.
    """
    move = _Move()
    moved: Sequence[object] = torch.utils._pytree.tree_map(move.tensor, inputs)
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            for node in list(module.graph.nodes):
                move.node(node)
            module.recompile()
    return moved


@dataclass
class _Move:
    memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By storage on the CPU: a tensor that keeps it, and the same memory of the card as bytes."""

    def tensor(self, tensor: Any) -> Any:
        """Returns a fake tensor of the card for one of the CPU; anything else as it is."""
        if not isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return tensor
        storage = tensor.untyped_storage()
        with tensor.fake_mode, torch.no_grad():
            if storage._cdata not in self.memory:
                self.memory[storage._cdata] = tensor, torch.empty(storage.nbytes(), dtype=torch.uint8, device=CARD)
            _, memory = self.memory[storage._cdata]
            return memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def node(self, node: fx.Node) -> None:
        """Moves one node: the tensors that it stands for, and the devices that it names. Constants are copied."""
        value = node.meta.get("val")
        if node.op == "get_attr" and isinstance(value, torch.Tensor):
            if value.dim() and value.device.type == "cpu":  # numbers stay there, where kernels take them as arguments
                with node.graph.inserting_after(node):
                    copy = node.graph.call_function(torch.ops.prims.device_put.default, (node, CARD))
                copy.meta = {**node.meta, "val": self.tensor(value)}
                node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
            return
        moved = {key: torch.utils._pytree.tree_map(self.tensor, node.meta[key]) for key in HELD if key in node.meta}
        node.meta = {**node.meta, **moved}  # the other half of the joint graph may share the dict
        node.args = fx.node.map_aggregate(node.args, on_card)
        node.kwargs = fx.node.map_aggregate(node.kwargs, on_card)


# -- lowering ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def generating_for(sheet: Datasheet, name: str) -> Iterator[None]:
    """Makes Inductor generate code for the card ``name`` while active.

    Other threads get their own answers about their devices. Only torch's interface of CUDA devices changes for all of them,
    and without such a device they never ask for it.
    """
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import DeviceProperties

    def lower_on_card(init: Method, lowering: Any, gm: fx.GraphModule, example_inputs: Any = None, **keywords: Any) -> None:
        init(lowering, gm, move_to_card(gm, example_inputs or []), **keywords)

    def run_on_card(run: Method, lowering: Any, *inputs: Any) -> Any:
        values = (node.meta.get("val") for node in lowering.module.graph.find_nodes(op="placeholder"))
        return run(lowering, *(a if isinstance(a, torch.Tensor) else b for a, b in zip(values, inputs, strict=True)))

    properties = _properties(sheet, name)
    capability: Callable[..., tuple[int, int]] = lambda *_: sheet.capability  # noqa: E731
    before = device_interface.get_interface_for_device("cuda")
    device_interface.register_interface_for_device("cuda", _interface(properties, sheet.capability))
    try:
        with (
            hooked(GraphLowering, "__init__", lower_on_card),
            hooked(GraphLowering, "run", run_on_card),
            substituted(torch.cuda, "get_device_properties", lambda *_: properties),
            substituted(torch.cuda, "get_device_capability", capability),
            substituted(torch.cuda, "current_device", lambda: CARD.index),
            substituted(scheduler, "has_triton", lambda: True),
            substituted(torch.utils._triton, "triton_hash_with_backend", lambda: ""),  # asks for the driver
            hooked(DeviceProperties, "create", lambda create, device: create.__func__.__wrapped__(DeviceProperties, device)),
            hooked(torch._C, "_conv_determine_backend_memory_format", _format_of_convolution),
        ):
            yield
    finally:
        device_interface.register_interface_for_device("cuda", before)


def _format_of_convolution(method: Method, image: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """On the card it is cuDNN's (``cudnn_conv_suggest_memory_format`` in `ConvUtils.h`), which a CPU does not ask."""
    from torch._prims_common import suggest_memory_format

    if image.device.type != CARD.type:
        found: torch.memory_format = method(image, weight, backend)
        return found
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
    is_last = last in (suggest_memory_format(image), suggest_memory_format(weight)) and image.dtype is not torch.float64
    return last if last is not None and is_last else torch.contiguous_format


def _properties(sheet: Datasheet, name: str) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        major=sheet.capability[0],
        minor=sheet.capability[1],
        total_memory=device_memory(name),
        multi_processor_count=sheet.multiprocessors,
        max_threads_per_multi_processor=THREADS.get(sheet.capability, 2048),
        max_threads_per_block=1024,
        regs_per_multiprocessor=REGISTERS,
        warp_size=WARP,
        shared_memory_per_block_optin=1024 * SHARED_KIB.get(sheet.capability, 227),
        gcnArchName="",
    )


def _interface(properties: SimpleNamespace, capability: tuple[int, int]) -> Any:
    from torch._dynamo.device_interface import DeviceInterface

    answers = {
        "device_count": 1,
        "current_device": CARD.index,
        "get_device_properties": properties,
        "get_compute_capability": 10 * capability[0] + capability[1],
        "is_available": True,
        "is_bf16_supported": capability >= (8, 0),
        "is_triton_capable": capability >= (7, 0),
        "raise_if_triton_unavailable": None,
    }
    functions = {name: staticmethod(lambda *_, answer=answer, **__: answer) for name, answer in answers.items()}
    return type("Card", (DeviceInterface,), {**functions, "Worker": type("Worker", (), functions)})
