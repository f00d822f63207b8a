"""An H100 that is not there, installed before torch is imported: properties, memory counters and Triton's driver for it."""

import ctypes
import os
from types import SimpleNamespace
from typing import Any

from emulated_cuda import library

NAME = "NVIDIA H100 80GB HBM3"
MEMORY_BYTES = 85_017_755_648
CAPABILITY = (9, 0)
SHARED_MEMORY_BYTES = 232_448
PROCESSORS = 132

PROPERTIES = SimpleNamespace(
    name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY_BYTES, multi_processor_count=PROCESSORS,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65_536, warp_size=32,
    shared_memory_per_block=49_152, shared_memory_per_block_optin=SHARED_MEMORY_BYTES,
    shared_memory_per_multiprocessor=233_472, L2_cache_size=50 * 2**20, is_integrated=0, is_multi_gpu_board=0,
    clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5120, gcnArchName="",
)  # fmt: skip

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3
"""Numbers of `at::SDPBackend`."""

WHEN = ("current", "peak")

KERNELS = {"cudnn": CUDNN, "flash": FLASH, "efficient": EFFICIENT, "math": MATH}
"""In torch's sequence."""
ATTENTION_VARIABLE = "EMULATED_ATTENTION"
"""Environment variable with the name of the fused kernel that the card prefers: by default cuDNN's, as on a real H100."""


def choose_attention(dtype: bytes, numbers: Any, dropout: float) -> int:
    """Returns the number of the kernel that the card takes. `choose_attention` of `device.cpp` writes the ``numbers``."""
    import torch

    from autoremat.tools.cuda_kernels import Attention

    dtypes = {"Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64}
    trains, causal, grouped, dimensions = numbers[18:22]

    def tensor(shape: Any, stride: int, offset: int, trains: int) -> Any:
        return SimpleNamespace(
            shape=tuple(shape), dim=lambda: len(shape), stride=lambda _: stride, storage_offset=lambda: offset,
            dtype=dtypes.get(dtype.decode()), requires_grad=bool(trains),
        )  # fmt: skip

    operands = [tensor(numbers[i : i + 12 : 3], numbers[12 + i], numbers[15 + i], trains) for i in range(3)]
    mask = tensor(numbers[24 : 24 + dimensions], numbers[22], 0, numbers[23]) if dimensions >= 0 else None
    attention: Any = Attention(*operands, mask, dropout, bool(causal), bool(grouped), CAPABILITY)
    kernels = list(KERNELS)[list(KERNELS).index(os.environ.get(ATTENTION_VARIABLE, "cudnn")) :]
    return KERNELS[next((kernel for kernel in kernels if kernel == "math" or getattr(attention, f"_suits_{kernel}")()), "math")]


def install() -> None:
    """Makes the card the CUDA device of this process."""
    device = library.load(choose_attention)
    import torch

    _install_properties(torch, device)
    _install_generated_code(torch)
    from emulated_cuda import attention, graphs, interpreter, triton_driver

    graphs.install_streams()
    graphs.install(device)
    triton_driver.install()
    attention.install()
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.install()


def _install_properties(torch: Any, device: ctypes.CDLL) -> None:
    """Replaces the functions of `torch.cuda` that ask the driver."""
    torch.version.cuda = "13.0"
    if not hasattr(torch._C, "_CudaDeviceProperties"):
        torch._C._CudaDeviceProperties = SimpleNamespace
    torch._C._cuda_getCurrentRawStream = lambda index: torch.accelerator.current_stream().stream_id
    torch._C._cuda_cudaCachingAllocator_is_enabled = lambda: True

    from emulated_cuda import allocation_log

    allocation_log.present.append(allocation_log.Log(device))

    def memory_bytes() -> tuple[int, int]:
        everything = 0  # `Memory` in `device.cpp`
        return device.emulated_live_bytes(everything), device.emulated_peak_bytes(everything)

    def statistics(device_index: Any = None) -> dict[str, int]:
        kinds = dict.fromkeys(("allocated_bytes", "requested_bytes", "active_bytes", "reserved_bytes"), memory_bytes())
        return {f"{kind}.all.{when}": size for kind, sizes in kinds.items() for when, size in zip(WHEN, sizes, strict=True)}

    def reset_peaks(device_index: Any = None) -> None:
        device.emulated_reset_peak()

    answers = {
        **dict.fromkeys(("is_available", "is_initialized", "_is_compiled", "is_bf16_supported", "is_tf32_supported"), True),
        **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0),
        **dict.fromkeys(("init", "_lazy_init", "set_device", "synchronize", "manual_seed", "manual_seed_all", "set_rng_state")),
        "_is_in_bad_fork": False, "device_count": 1, "get_device_properties": PROPERTIES, "get_device_name": NAME,
        "get_device_capability": CAPABILITY, "get_arch_list": ["sm_90"], "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
    }  # fmt: skip
    for name, answer in answers.items():  # a function of its own for each name: Dynamo has a rule for each
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    pages = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)  # the host's memory is the card's
    torch.cuda.cudart = lambda: pages
    torch.cuda.get_rng_state = lambda device="cuda": torch.zeros(16, dtype=torch.uint8)
    torch.cuda.memory_stats = statistics
    torch.cuda.memory_allocated = lambda device_index=None: memory_bytes()[0]
    torch.cuda.max_memory_allocated = lambda device_index=None: memory_bytes()[1]
    torch.cuda.memory_reserved, torch.cuda.max_memory_reserved = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
    torch.cuda.reset_peak_memory_stats = reset_peaks
    torch.cuda.empty_cache = lambda: None


def _install_generated_code(torch: Any) -> None:
    """Replaces functions that fake tensors and generated code call."""
    from torch._functorch import config
    from torch._subclasses.fake_tensor import FakeTensorMode

    config.graphsafe_rng_functionalization = False  # the card has no generators, only states of them
    # Constants of a traced graph stay fake.
    FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[assignment,method-assign]

    def empty_strided(sizes: Any, strides: Any, dtype: Any) -> Any:
        return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")

    torch._C._dynamo.guards._empty_strided_cuda = empty_strided
