"""Torch's private names for Inductor and AOTAutograd alone, their settings, and the settings that kernels depend on."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._logging._internal import trace_structured

from autoremat.basics.errors import find_cause
from autoremat.basics.progress import now
from autoremat.options.options import Options
from autoremat.torch_private.joint_graphs import CustomPartitionerFn, PartitionedModules


def compile_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], config: dict[str, Any], eager_backward: bool = False
) -> Callable[..., Any]:
    """Returns ``module`` compiled by Inductor, with its caches. ``config`` also applies to later compilations of its code.

    With ``eager_backward``, the backward is compiled together with the forward instead of at its first call. The peak of both
    halves is then known while the plan can still change.
    """
    from torch._inductor.compile_fx import compile_fx

    now("compiling with Inductor")
    with functorch_config.patch({"force_non_lazy_backward_lowering": True} if eager_backward else {}):
        compiled: Any = compile_fx(module, inputs, config_patches=config)
    return cast(Callable[..., Any], compiled)


def partitioned_by(partitioner: CustomPartitionerFn) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which Inductor asks ``partitioner`` for the halves of joint graphs."""
    return cast(contextlib.AbstractContextManager[None], inductor_config.patch(custom_partitioner_fn=partitioner))


def require_cpp_compiler(config: dict[str, Any]) -> None:
    """Raises the error of Inductor that no C++ compiler works, if none does under the settings of ``config``."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    with inductor_config.patch(config):
        get_cpp_compiler()


def cpp_compiler() -> str:
    """Returns the C++ compiler that Inductor would use; empty if none works."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(get_cpp_compiler())
    except InvalidCxxCompiler:
        return ""


def lacks_cpp_compiler(error: BaseException) -> bool:
    """Returns True if ``error`` is, or wraps, the error of Inductor that no C++ compiler works."""
    from torch._inductor.exc import InvalidCxxCompiler

    return find_cause(error, InvalidCxxCompiler) is not None


def _run_uncompiled(module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch.fx.graph import _BoxedCodeGen

    # Not by fx.Interpreter: it writes to data that another thread's tracing reads.
    module.graph.set_codegen(_BoxedCodeGen())  # takes the arguments in a list, and frees each tensor after its last use
    module.recompile()
    forward = module.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark for functions that empty their argument list
    return run


def compile_uncompiled(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., PartitionedModules],
) -> Callable[..., Any]:
    """Returns ``module`` compiled by AOTAutograd with ``partition``. It runs as plain ATen calls."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=_run_uncompiled, bw_compiler=_run_uncompiled, partition_fn=partition, keep_inference_input_mutations=True
    )
    compiled: Callable[..., Any] = backend(module, inputs)
    return compiled


def trace_as_inductor_does(
    module: fx.GraphModule, inputs: Sequence[Any], config: dict[str, Any], run: Callable[..., Any] = _run_uncompiled
) -> Callable[..., Any]:
    """Returns a callable for ``module`` as :func:`compile_with_inductor` does, but generates no code.

    ``custom_partitioner_fn`` gets the same joint graph. The halves run as ``run`` has them: op by op. No cache is used.
    """
    from torch._inductor.compile_fx import compile_fx

    with without_caches():
        compiled: Any = compile_fx(module, inputs, lambda graph, given, **_: run(graph, given), config_patches=config)
    return cast(Callable[..., Any], compiled)


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """Disables the caches of AOTAutograd and Inductor while active, for reading and for writing."""
    with (
        functorch_config.patch({"enable_autograd_cache": False}),
        inductor_config.patch({"force_disable_caches": True}),
    ):
        yield


# -- settings ----------------------------------------------------------------------------------------------------------


def inductor_config_names() -> frozenset[str]:
    """Returns the names of Inductor's options, in the spelling of ``torch.compile(options=...)``."""
    return frozenset(vars(inductor_config)["_config"]) | frozenset(inductor_config.get_config_copy())


def asked_config(options: Options) -> dict[str, Any]:
    """Returns the Inductor settings that the options ask for, by a mode of ``torch.compile`` and by name."""
    from torch._inductor import list_mode_options

    return {**(list_mode_options(options.mode) if options.mode is not None else {}), **dict(options.inductor)}


def configuration_fingerprint() -> str:
    """Returns text that changes with any setting of Inductor or AOTAutograd that could change a joint graph."""
    portable = inductor_config.save_config_portable()
    portable.pop("custom_partitioner_fn", None)
    return repr(sorted((k, repr(v)) for k, v in [*portable.items(), *functorch_config.save_config_portable().items()]))


def most_reads_inlined() -> int:
    """Returns the most buffers that a value may read for Inductor to inline it into several readers, by the present setting."""
    return int(inductor_config.realize_reads_threshold)


def lays_channels_last(device_type: str) -> bool:
    """Returns True if Inductor runs all convolutions of images on that device type channels last: on a CPU with oneDNN."""
    library: Any = torch.backends.mkldnn
    has_library = library.enabled and library.is_available()
    return bool(device_type == "cpu" and has_library and inductor_config.layout_optimization)


def keeps_dead_draws(config: Mapping[str, Any]) -> bool:
    """Returns True if torch draws random numbers that nothing reads, by ``config`` or else by the present setting."""
    return bool(config.get("fallback_random", inductor_config.fallback_random))


def writes_wrapper_in_cpp() -> bool:
    """Returns True if Inductor writes the wrapper of its kernels in C++, by the present setting."""
    return bool(inductor_config.cpp_wrapper)


def records_cuda_graphs() -> bool:
    """Returns True if Inductor records what it compiles as CUDA graphs, by the present setting."""
    return bool(inductor_config.triton.cudagraphs)


def force_stride_order() -> Any:
    """Returns the op that copies a tensor into given strides, in graphs that Inductor compiles."""
    from torch._inductor import inductor_prims

    return inductor_prims.force_stride_order


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Adds the JSON text of ``payload()`` to the trace of the graph that is being compiled.

    ``payload`` is called only if ``TORCH_TRACE`` or ``TORCH_TRACE_DIR`` asks for a trace.
    """
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload)


# -- settings and instructions of kernels ----------------------------------------------------------------------------------


def packs_operands(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN multiplies matrices of ``dtype`` on this CPU (AVX-512, AMX). It packs the operands for that."""
    probe = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype, "")
    available: Any = torch.backends.mkldnn.is_available
    return bool(probe and available() and getattr(torch.ops.mkldnn, probe)())


def rounds_to_tf32(convolutions: bool = False) -> bool:
    """Returns True if CUDA may round the operands of float32 matrix products to TF32 or less. Torch's default is False.

    cuDNN's ``convolutions`` have a setting of their own, by default True.
    """
    backends: Any = torch.backends
    return bool((backends.cudnn.conv if convolutions else backends.cuda.matmul).fp32_precision == "tf32")


def float32_precision() -> str:
    """Returns text that changes with the permitted rounding in float32 products and convolutions, for the CPU and for CUDA.

    It reads the setting of each backend: torch's common setting raises an error once a user has set a single backend.
    """
    backends: Any = torch.backends
    return " ".join(one.fp32_precision for one in (backends.mkldnn.matmul, backends.cuda.matmul, backends.cudnn.conv))


def machine_fingerprint() -> str:
    """Returns text that changes with this CPU's instructions, which kernels depend on, and with the switches of libraries."""
    cuda: Any = torch.backends.cuda
    switches = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
    packed = [packs_operands(dtype) for dtype in (torch.bfloat16, torch.float16)]
    tiles = [torch.cpu._is_amx_tile_supported(), torch.cpu._is_amx_fp16_supported()]
    libraries: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    enabled = [*(getattr(cuda, switch)() for switch in switches), *(library.enabled for library in libraries)]
    return f"{torch.backends.cpu.get_cpu_capability()} {packed} {tiles} {enabled}"
