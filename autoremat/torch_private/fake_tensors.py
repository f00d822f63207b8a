"""Torch's private names for fake tensors, for tracing a step without compiling or running it, and for an optimizer's step."""

import contextlib
import logging
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx._lazy_graph_module import _make_graph_module
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from autoremat.basics.errors import find_cause
from autoremat.basics.units import rounded
from autoremat.torch_private import compilers, joint_graphs
from autoremat.torch_private.hooks import assigned, when_dropped
from autoremat.torch_private.tensors import tensors_in

MANY = 1 << 20

RUNS_NOTHING = {"shape_padding": False, "max_autotune": False, "max_autotune_gemm": False, "max_autotune_pointwise": False}
"""Inductor settings under which no decision depends on running a kernel."""

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors raised when code asks for the value of a fake tensor."""

FAILED_OP = torch._dynamo.exc.TorchRuntimeError
"""The error raised when an op rejects its arguments. The op's own error is the first of its causes."""

Partition = Callable[..., joint_graphs.PartitionedModules]


def is_fake(value: object) -> bool:
    """Returns True for a fake tensor, which has no memory."""
    return isinstance(value, FakeTensor)


def new_mode() -> FakeTensorMode:
    """Returns a mode in which tensors have sizes, types and devices, and no memory. It turns real tensors into fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a fake tensor, or parameter, with the sizes, strides and type of ``tensor``, on ``device``.

    Raises ``NotImplementedError`` for a tensor subclass on another device.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        if tensor.device != device:
            raise NotImplementedError(f"a {type(tensor).__name__} cannot be moved to another device without its data")
        return mode.from_tensor(tensor, static_shapes=True)
    with mode, torch.no_grad():
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        made = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def compiled_by(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` with its graphs handed to ``backend``.

    All sizes are constants, whatever was compiled before. Dynamo raises errors, and no recompile limit applies.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        settings = {
            "recompile_limit": MANY, "accumulated_recompile_limit": MANY, "automatic_dynamic_shapes": False,
            "suppress_errors": False,
        }  # fmt: skip
        log = logging.getLogger("torch._subclasses.fake_tensor")  # of an op that rejects its arguments, which raises too
        with torch._dynamo.config.patch(settings), warnings.catch_warnings(), assigned(log, "disabled", True):
            # Dynamo reads the gradients of a graph's inputs. After a graph break, these are not leaves.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
            return torch.compile(function, backend=backend, dynamic=False)(*args, **kwargs)

    return run


class Stop(Exception):
    """Ends a compilation from within torch, once all is known that it was begun for."""


def stop(*_: Any, **__: Any) -> Any:
    """Raises :class:`Stop` where torch asks for halves or for code."""
    raise Stop


def own_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs that Dynamo hands to a backend, with tensors converted to the fake mode of Dynamo's tracing."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    assert mode is not None, "called by Dynamo"
    return [mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x for x in inputs]


def trace_joint(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Partition,
    inductor: bool,
    config: Mapping[str, Any],
) -> None:
    """Traces the joint graph of ``module`` with AOTAutograd and hands it to ``partition``, which raises :class:`Stop`.

    ``inductor`` selects Inductor's decompositions and its passes over joint graphs, under ``config``.
    Returns normally if there is no backward.
    """
    try:
        if not inductor:
            compilers.compile_uncompiled(module, inputs, partition)
            return
        compilers.trace_as_inductor_does(module, inputs, {**config, "custom_partitioner_fn": partition}, stop)
    except Exception as error:
        if find_cause(error, Stop) is None:
            raise


def partition_for(
    share: float, joint: fx.GraphModule, inputs: Sequence[object], keywords: Mapping[str, Any]
) -> joint_graphs.PartitionedModules:
    """Returns torch's own partition of a copy of ``joint`` at ``activation_memory_budget=share``.

    Budgets in the model are ignored.
    """
    copied = copied_module(joint)
    for node in copied.graph.nodes:
        if joint_graphs.torchs_budget(node) is not None:
            node.meta["custom"] = {k: v for k, v in node.meta["custom"].items() if k != joint_graphs.BUDGET_KEY}
    with functorch_config.patch(activation_memory_budget=share):
        return joint_graphs.partition_as_torch_does(copied, inputs, **keywords)


def copied_module(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a module with a :func:`shallow_copy` of the graph, and with the same attributes and metadata."""
    copied = _make_graph_module(module, shallow_copy(module.graph))  # while Inductor compiles, its Python is written if it runs
    copied.meta = dict(module.meta)
    return copied


def shallow_copy(graph: fx.Graph) -> fx.Graph:
    """Returns a copy of the graph whose nodes have the same names and metadata."""
    copied = fx.Graph()
    result = copied.graph_copy(graph, {})
    copied.output(result)
    for before, after in zip(graph.find_nodes(op="output"), copied.find_nodes(op="output"), strict=True):
        after.meta = dict(before.meta)
    return copied


# -- an optimizer's step on fake tensors: a copy of the optimizer, and the bytes that its ops make ---------------------------


READS_DATA = torch.ops.aten._local_scalar_dense.default
"""The op behind ``tensor.item()``."""

NUMBER_BYTES = 8
"""Bytes of the tensor on the CPU that an op makes of a number of Python. It makes another one in the type of its result."""

Workspace = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], int]
"""Returns bytes for an op, its arguments by position and by name, and its result, with fake tensors."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses
    """Runs ops on fake tensors while active, and counts the bytes of the storages that they make.

    Single numbers on the CPU are real, such as a count of steps, so that code can read them. Asked for the number in a fake
    tensor, the mode assumes 1 and counts it in ``assumed_numbers``.
    """

    def __init__(
        self, mode: FakeTensorMode, device_type: str, rounding: int, counts_numbers: bool, workspace_of: Workspace
    ) -> None:
        """Makes the mode. Storages of ``device_type`` count, each rounded up to a multiple of ``rounding`` bytes.

        ``counts_numbers`` is True if the tensors that ops make of numbers of Python count, because they are on that device.
        ``workspace_of`` returns the bytes that a call takes beside its results while it runs.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.workspace_of = workspace_of
        self.mode, self.device_type, self.rounding, self.counts_numbers = mode, device_type, rounding, counts_numbers
        self.live = self.peak = self.assumed_numbers = 0
        self._sizes: dict[int, int] = {}

    def count(self, tensor: torch.Tensor, size: int | None = None) -> None:
        """Counts the storage of ``tensor``, unless it is counted already, until it is freed. ``size`` replaces its bytes."""
        if is_wrapper(tensor):
            for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # such tensors have it
                self.count(getattr(tensor, name), size)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        known = tensor.device.type == self.device_type
        self._sizes[key] = rounded(storage.nbytes() if size is None else size, self.rounding) if known else 0
        self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)
        when_dropped(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(map(is_wrapper, tensors_in((args, kwargs or {})))):
            return NotImplemented  # the subclass runs ops on its inner tensors, which come here
        made = self._run(func, args, kwargs or {})
        for tensor in tensors_in(made):
            self.count(tensor)
        self.peak = max(self.peak, self.live + self.workspace_of(func, args, kwargs or {}, made))
        if self.counts_numbers and any(isinstance(leaf, (int, float)) for leaf in tree_leaves((args, kwargs))):
            results = tensors_in(made) or tensors_in((args, kwargs))  # ops in place on lists of tensors return nothing
            converted = max((tensor.element_size() for tensor in results), default=0)
            self.peak = max(self.peak, self.live + NUMBER_BYTES + converted)
        return made

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = tensors_in((args, kwargs))
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            if func is READS_DATA:
                self.assumed_numbers += 1
                return True if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
            with self.mode:
                return func(*args, **kwargs)
        if given:
            return func(*args, **kwargs)
        with self.mode:
            made = func(*args, **kwargs)
        return func(*args, **kwargs) if isinstance(made, torch.Tensor) and is_number(made) else made


is_wrapper: Callable[[Any], bool] = is_traceable_wrapper_subclass
"""Returns True for a tensor that consists of others, such as optimizer state of 8 bits with its scales."""


def is_number(tensor: torch.Tensor) -> bool:
    """Returns True for a single number on the CPU."""
    return tensor.numel() <= 1 and tensor.device.type == "cpu"


HOOKS = (
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip
"""Attributes that hold the user's hooks. A copy has none."""

AVERAGERS = "torch.distributed.algorithms.model_averaging.averagers"
"""The module of local SGD, by which replicas average their parameters."""

OWN_METHODS = ("step", "zero_grad")
"""Methods that schedulers of the learning rate and others replace on an instance. The copy has those of its class."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local shard of a distributed tensor; any other tensor as it is."""
    if "torch.distributed.tensor" not in sys.modules:
        return tensor
    shard = getattr(tensor, "_local_tensor", None)
    return shard if isinstance(shard, torch.Tensor) else tensor


class FakeCopies:
    """Fake copies of real tensors, and of what holds them: one for each original."""

    def __init__(self, mode: FakeTensorMode, device: torch.device | None = None) -> None:
        """Makes the copies on ``device``; None for the device of each tensor."""
        self.mode, self.device = mode, device
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.holders: dict[int, Any] = {}
        """Copies of optimizers, dicts and lists by the identity of the original."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the copy of ``tensor``: of its local shard, if it is distributed. Single numbers on the CPU stay real."""
        if id(tensor) not in self.made:
            self.made[id(tensor)] = tensor, self._copy(tensor)
        return self.made[id(tensor)][1]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        own = local(tensor).detach()
        if is_number(own) and not isinstance(own, FakeTensor) and not tensor.requires_grad:
            return own.clone()
        if is_wrapper(own):  # such as state of 8 bits
            return self.mode.from_tensor(own, static_shapes=True)
        return fake_like(self.mode, own, self.device or own.device).requires_grad_(tensor.requires_grad)


def fake_copy(optimizer: Optimizer, copies: FakeCopies) -> Optimizer:
    """Returns the copy of ``optimizer`` without its hooks. Its parameters, gradients and state are fake ``copies``.

    Optimizers inside of it, whose steps its own step calls, are copied too. An averager of local SGD is replaced by one that
    sends nothing and averages after each step.
    """
    if id(optimizer) in copies.holders:
        found: Optimizer = copies.holders[id(optimizer)]
        return found
    copied: Optimizer = object.__new__(type(optimizer))
    copies.holders[id(optimizer)] = copied
    for name, value in vars(optimizer).items():
        if name not in OWN_METHODS:
            setattr(copied, name, OrderedDict() if name in HOOKS else _faked(value, copies))
    return copied


def _faked(value: Any, copies: FakeCopies) -> Any:
    if isinstance(value, Optimizer):
        return fake_copy(value, copies)
    if isinstance(value, torch.Tensor):
        return copies.of(value)
    if AVERAGERS in sys.modules and isinstance(value, sys.modules[AVERAGERS].ModelAverager):
        return _LocalAverager()
    if id(value) in copies.holders:
        return copies.holders[id(value)]
    if type(value) in (dict, OrderedDict, defaultdict):
        made: Any = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        copies.holders[id(value)] = made
        made.update({_faked(key, copies): _faked(one, copies) for key, one in value.items()})
        return made
    if type(value) is list:
        items: list[Any] = []
        copies.holders[id(value)] = items
        items.extend(_faked(one, copies) for one in value)
        return items
    return tuple(_faked(one, copies) for one in value) if type(value) is tuple else value


class _LocalAverager:
    """Stands for an averager of local SGD: it makes the copy of the parameters that a real one sends, and frees it."""

    def average_parameters(self, params: Iterable[Any]) -> None:
        groups = (one["params"] if isinstance(one, dict) else [one] for one in params)
        torch.cat([p.detach().flatten() for group in groups for p in group if p.grad is not None])


def step_of(optimizer: Optimizer) -> Callable[[], Any]:
    """Returns the step of the optimizer's class, without the hooks that torch runs around it."""
    step: Any = type(optimizer).step
    inner = step.__wrapped__ if getattr(step, "hooked", None) else step
    return lambda: inner(optimizer)


@contextlib.contextmanager
def as_in_training() -> Iterator[None]:
    """Makes optimizers take the paths for fake tensors that they take for real ones, while active.

    They choose between foreach and a loop by the types of tensors, and have paths of their own while torch compiles.
    """
    supported: list[Any] = torch_optimizer._foreach_supported_types
    supported.append(FakeTensor)
    try:
        with assigned(torch.compiler, "_is_compiling_flag", False), tracing(None), unset_fake_temporarily():
            yield
    finally:
        supported.remove(FakeTensor)
