"""The code that Inductor generates for the card: explained without a run, and every kernel compiled by Triton for sm_90.

These checks run without Triton's interpreter, because it takes the place of the compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from torch._inductor.codecache import PyCodeCache

import autoremat
from autoremat.torch_private import inductor_lowering

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'", re.S)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The wrapper code of all halves that Inductor generates."""
    found: list[str] = []
    original = inductor_lowering._lowered_peak

    def keep(lowering: Any, source: str, known: Any) -> Any:
        found.append(source)
        return original(lowering, source, known)

    monkeypatch.setattr(inductor_lowering, "_lowered_peak", keep)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.bfloat16), ("resnet", torch.float32)])
def test_every_kernel_of_an_explained_step_compiles(name, dtype, sources):
    module, inputs = models.build(name, **({} if name == "resnet" else {"layers": 2}))
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    options = {"cost_model": "roofline", "on_infeasible": "best_effort"}
    whole = autoremat.explain(module.to(dtype), *inputs, device="cuda", lower=True, options=options)
    assert whole.compiled_peak_bytes is not None
    budget = int(0.7 * whole.compiled_peak_bytes)
    report = autoremat.explain(module, *inputs, device="cuda", lower=True, options=options | {"memory_budget": budget})
    assert report.compiled_peak_bytes is not None
    assert report.compiled_peak_bytes < whole.compiled_peak_bytes
    assert report.recomputed_ops > 0
    # A kernel that has two names, as in the code of two plans, is compiled once.
    kernels = {code.replace(kernel, "kernel"): (code, kernel) for source in sources for kernel, code in KERNEL.findall(source)}
    assert len(kernels) >= 10
    with torch._inductor.config.patch(use_static_triton_launcher=False):  # a static launcher hides what was compiled
        for code, kernel in kernels.values():
            tuner = getattr(PyCodeCache.load(code), kernel)
            assert tuner._precompile_config(tuner.configs[0]).kernel.asm["cubin"]
