"""Streams, events and CUDA graphs of the emulated card. Graphs are recorded by torch's own manager, and are not replayed."""

import ctypes
import time
from typing import Any

import torch

POOL = (0, 1)
POOL_MEMORY, OUTSIDE = 1, 2
"""Parts of the memory: `Memory` in `device.cpp`."""


class Graph:
    """A CUDA graph. Its one execution is that of the recording."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.executions = 0

    def capture_begin(self, pool: Any = POOL, **_: Any) -> None:
        use_pool(True)

    def capture_end(self) -> None:
        use_pool(False)

    def replay(self) -> None:
        self.executions += 1
        assert self.executions == 1, "the emulated card records CUDA graphs and cannot replay them"

    def pool(self) -> tuple[int, int]:
        return POOL

    def reset(self) -> None:
        pass

    def register_generator_state(self, state: Any) -> None:
        pass


def use_pool(wanted: bool) -> None:
    """Makes this thread allocate in the pool, or outside."""
    device[0].emulated_use_pool(ctypes.c_bool(wanted))


def peaks() -> tuple[int, int]:
    """Returns the most bytes live in the pool and outside of it since `torch.cuda.reset_peak_memory_stats()`."""
    pool, outside = (int(device[0].emulated_peak_bytes(memory)) for memory in (POOL_MEMORY, OUTSIDE))
    return pool, outside


device: list[ctypes.CDLL] = []
"""The library, once installed."""


def _tensor(metadata: dict[str, Any], storage: Any) -> Any:
    """Returns a tensor of a storage that belongs to somebody else."""
    empty = torch.empty(0, dtype=metadata["dtype"], device="cuda")
    return empty.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])


def install(library: ctypes.CDLL) -> None:
    """Makes recordings those of `torch.cuda`."""
    device.append(library)
    torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = Graph  # type: ignore[misc,assignment]
    torch.cuda.graph_pool_handle = torch.cuda.graphs.graph_pool_handle = lambda: POOL  # type: ignore[assignment,return-value]
    bindings: Any = torch._C
    bindings._cuda_beginAllocateCurrentThreadToPool = lambda device, pool: use_pool(True)
    bindings._cuda_endAllocateToPool = lambda device, pool: use_pool(False)
    bindings._construct_CUDA_Tensor_From_Storage_And_Metadata = _tensor
    bindings._tensors_data_ptrs_at_indices_equal = lambda tensors, pointers, indices: all(
        tensors[i].data_ptr() == pointers[i] for i in indices
    )
    bindings._free_And_Remove_DeleterFn = lambda storage: library.emulated_free(ctypes.c_void_p(storage))
    bindings._cuda_checkPoolLiveAllocations = lambda *_: True
    nothing = (
        "_cuda_releasePool", "_cuda_getCheckpointState", "_cuda_clearCublasWorkspaces", "_cuda_get_conv_benchmark_empty_cache",
        "_cudnn_set_conv_benchmark_empty_cache", "_host_emptyCache", "_set_storage_access_error_msg",
        "_set_storage_data_ptr_access_error_msg",
    )  # fmt: skip
    for name in nothing:
        setattr(bindings, name, lambda *_: None)


DEVICE = torch.device("cuda", 0)


class Stream(torch.Stream):
    """A stream: a number that is the current one of a thread, or not."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Any:
        return super().__new__(cls, **known) if known else super().__new__(cls, DEVICE, priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The handle of the driver: the stream's number."""
        return int(self.stream_id)


class Event(torch.Event):
    """An event by the host's clock."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
        return super().__new__(cls, DEVICE, enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record(stream or torch.cuda.current_stream())
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Any) -> float:
        """Returns the milliseconds from this event to ``end``."""
        return float(1e3 * (end.seconds - self.seconds))


def _numbers(stream: torch.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def install_streams() -> None:
    """Makes streams and events those of `torch.cuda`."""
    torch.cuda.Stream = torch.cuda.streams.Stream = Stream  # type: ignore[misc,attr-defined]
    torch.cuda.Event = torch.cuda.streams.Event = Event  # type: ignore[misc,attr-defined]
    bindings: Any = torch._C
    bindings._cuda_getCurrentStream = lambda device: _numbers(torch.accelerator.current_stream(DEVICE))
    bindings._cuda_getDefaultStream = lambda device: (0, DEVICE.index, Stream().device_type)
    bindings._cuda_setStream = lambda **numbers: torch.accelerator.set_stream(torch.Stream(**numbers))
