"""Torch's private names for distributed jobs: process groups, what ``fully_shard`` gathers, processes, pipelines.

Nothing here imports ``torch.distributed.pipelining``. A process that has not imported it runs no pipeline.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoremat.basics.checks import as_int, refused
from autoremat.basics.errors import OptionsError
from autoremat.torch_private.frames import calling

UNKNOWN_RANKS = 1 << 20
"""Ranks of a group that this process does not know. The share that each rank sends is then nearly 1, its upper bound."""


def name_of(group: object) -> str:
    """Returns the name of the process group that a collective's argument holds: a name, or the group itself."""
    if isinstance(group, str):
        return group
    return str(getattr(group, "group_name", group))


def group_of(name: str) -> dist.ProcessGroup | None:
    """Returns the process group of that name; None if this process does not know it."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    distributed: Any = dist.distributed_c10d
    known: Callable[[str], dist.ProcessGroup] = distributed._resolve_process_group
    try:
        return known(name)
    except (LookupError, ValueError, RuntimeError):
        return None


def size_of(name: str) -> int:
    """Returns the number of ranks of the group ``name``."""
    group = group_of(name)
    return UNKNOWN_RANKS if group is None else int(group.size())


def is_fake(name: str) -> bool:
    """Returns True if the group ``name`` sends nothing, because its other ranks do not exist."""
    group = group_of(name)
    return group is not None and dist.get_backend(group) == "fake"


def ranks_of(name: str) -> frozenset[int]:
    """Returns the global ranks of the group ``name``; an impossible one for an unknown group."""
    group = group_of(name)
    return frozenset({-1}) if group is None else frozenset(dist.get_process_group_ranks(group))


def position_in(name: str) -> int:
    """Returns the position of this process among the ranks of the group ``name``."""
    group = group_of(name)
    if group is None:
        raise LookupError(f"this process knows no process group {name!r}")
    return int(group.rank())


def members() -> str:
    """Returns the name of each process group of this process with its ranks in sequence, as text; empty without groups."""
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    groups: Mapping[dist.ProcessGroup, str] = dist.distributed_c10d._world.pg_names
    return f"{sorted((name, dist.get_process_group_ranks(group)) for group, name in groups.items())}"


def identity() -> str:
    """Returns text that identifies the world of this process; empty without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    return f"{dist.get_backend()} {dist.get_world_size()}"


def gathered_groups(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yields, for each group of parameters that is gathered as a whole, its gathered bytes and True if it is freed after use.

    The root's own parameters stay gathered between forward and backward.
    """
    if not dist.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    taken: set[int] = set()
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in reversed(shards):  # inner ones first
        own = [p for p in module.parameters() if id(p) not in taken]
        taken.update(map(id, own))
        group: Any = module._get_fsdp_state()._fsdp_param_group
        kept = module is shards[0] or (group is not None and group.post_forward_mesh_info is None)
        types = {} if group is None else {id(one.sharded_param): one.mp_policy.param_dtype for one in group.fsdp_params}
        yield sum(p.numel() * (types.get(id(p)) or p.dtype).itemsize for p in own), not kept


IN_ONE_PROCESS = ("fake", "threaded")
"""Backends of process groups whose ranks are not processes, as tests of torch use them."""


@dataclass(frozen=True, eq=False)
class Job:
    """A distributed job of several processes, as one of them sees it."""

    rank: int
    world_size: int
    store: Any
    """The store of the default process group, with a connection of its own. Nobody else waits behind our requests."""
    timeout: float = 1800.0
    """Seconds after which a collective of the default process group fails."""
    arrivals: Counter[str] = field(default_factory=Counter)
    """Number of times that this process has come to each meeting of ranks."""
    groups: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = field(default_factory=dict)
    """Of the ranks that are expected at a place, those that came the last time."""


_present: tuple[Any, Job] | None = None
"""The default process group and its job."""

_number = count()


def job() -> Job | None:
    """Returns the job that this process belongs to; None if it works alone.

    A process group that is initialized anew is another job.
    """
    global _present
    if not dist.is_available() or not dist.is_initialized():
        return None
    group: Any = dist.distributed_c10d._get_default_group()
    if _present is None or _present[0] is not group:
        if dist.get_world_size() == 1 or dist.get_backend() in IN_ONE_PROCESS:
            return None
        store: Any = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            store = store.clone()  # a store of the user's own may not have it, and one connection works as well
        # A store can outlive the process group, so each group of this process has its own keys.
        store = dist.distributed_c10d.PrefixStore(f"autoremat/{next(_number)}", store)
        backends = (group._get_backend(torch.device(kind)) for kind in group._device_types)
        limits = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
        known = [one for one in limits if one] or [dist.distributed_c10d._get_default_timeout(dist.get_backend(group))]
        timeout = min(one.total_seconds() for one in known)
        _present = group, Job(dist.get_rank(), dist.get_world_size(), store, timeout)
    return _present[1]


STAGES, SCHEDULES = "torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules"

METADATA_INFERENCE = "_forward_metadata_inference"
"""Name of the method by which a stage learns the shapes of its results."""

OPENS, CLOSES, SPLITS = "F", ("B", "W"), ("I", "W")
"""Actions of a schedule: the one that opens a call, those that close it, and those of a backward that runs in two parts."""


def infers_metadata() -> bool:
    """Returns True if a stage runs only to learn the shapes of its results, before the first micro-batch."""
    return STAGES in sys.modules and any(frame.f_code.co_name == METADATA_INFERENCE for frame in calling())


def in_flight(schedule: Any, stage_index: int) -> int:
    """Returns the most calls of a stage that are open at once under ``schedule``, for the option of the same name.

    ``schedule`` is an object of ``torch.distributed.pipelining``, made of stages that are not compiled yet. Compile their
    modules in place afterwards: ``module.compile(backend="autoremat", options={"in_flight": ...})``.

    Raises ``OptionsError`` for an object that is no schedule and for a stage that it does not have. Also raises it for a
    schedule that computes the gradients of inputs and of weights in two backwards, as zero-bubble schedules do.
    """
    schedules = sys.modules.get(SCHEDULES)
    if schedules is None or not isinstance(schedule, schedules._PipelineSchedule):
        raise OptionsError(
            f"{type(schedule).__name__} is no schedule of torch.distributed.pipelining. Accepted: Schedule1F1B, ScheduleGPipe, "
            "ScheduleInterleaved1F1B, ScheduleLoopedBFS, and others whose backward runs in one part"
        )
    if any(kind in SPLITS for _, kind in _actions(schedule)):
        raise OptionsError(
            f"{type(schedule).__name__} computes the gradients of inputs and of weights in two backwards, and a compiled graph "
            "has one. Accepted: Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B and ScheduleLoopedBFS, or stages without "
            "torch.compile"
        )
    index, stages = as_int(stage_index), int(schedule._num_stages)
    if index is None or not 0 <= index < stages:
        raise refused("stage_index", stage_index, f"0 to {stages - 1}, the stages of the schedule")
    microbatches = int(schedule._n_microbatches)
    if isinstance(schedule, schedules.Schedule1F1B):  # torch runs schedules of a single stage by these formulas
        return min(microbatches, stages - index)
    if isinstance(schedule, schedules._ScheduleForwardOnly):
        return 1
    # Without a list of actions, as in a subclass of a user's own, all calls may be open at once. GPipe's are.
    changes = ((kind == OPENS) - (kind in CLOSES) for of, kind in _actions(schedule) if of == index)
    return max(accumulate(changes), default=0) or microbatches


def _actions(schedule: Any) -> Iterator[tuple[int, str]]:
    """Yields the actions of ``schedule`` on all ranks, in sequence, each with its stage. Compound actions are taken apart."""
    order = getattr(schedule, "pipeline_order", None)
    for actions in (order or getattr(schedule, "pipeline_order_with_comms", None) or {}).values():
        for action in filter(None, actions):
            for single in action.sub_actions or (action,):
                yield int(single.stage_index), str(single.computation_type.value)
