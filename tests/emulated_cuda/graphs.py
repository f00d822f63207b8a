"""Recording of CUDA graphs on the emulated card: kernels run while they are recorded, and allocate in the pool of the graphs.

Torch's own manager of CUDA graphs runs unchanged. It warms a function up in the pool, and records it in the next step, with
copies of its inputs in the pool. The card cannot replay what it recorded, so a third step raises an error.
"""

from __future__ import annotations

import ctypes
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
