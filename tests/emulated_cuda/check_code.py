"""Every kernel that Inductor generates for the card, compiled by Triton for sm_90 without its interpreter."""

import re

import models
import pytest
import torch
from captured import generated
from torch._inductor.codecache import PyCodeCache

import autoremat

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'", re.S)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.bfloat16), ("resnet", torch.float32)])
def test_every_kernel_of_an_explained_step_compiles(name, dtype):
    module, inputs = models.build(name, **({} if name == "resnet" else {"layers": 2}))
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    options = {"cost_model": "roofline", "on_infeasible": "best_effort"}
    with generated() as halves:
        whole = autoremat.explain(module.to(dtype), *inputs, device="cuda", lower=True, options=options)
        assert whole.compiled_peak_bytes is not None
        budget = int(0.7 * whole.compiled_peak_bytes)
        report = autoremat.explain(module, *inputs, device="cuda", lower=True, options=options | {"memory_budget": budget})
    assert report.compiled_peak_bytes is not None
    assert report.compiled_peak_bytes < whole.compiled_peak_bytes
    assert report.recomputed_ops > 0
    # A kernel that has two names, as in the code of two plans, is compiled once.
    found = [names for source, _ in halves for names in KERNEL.findall(source)]
    kernels = {code.replace(kernel, "kernel"): (code, kernel) for kernel, code in found}
    assert len(kernels) >= 10
    with torch._inductor.config.patch(use_static_triton_launcher=False):  # a static launcher hides what was compiled
        for code, kernel in kernels.values():
            tuner = getattr(PyCodeCache.load(code), kernel)
            assert tuner._precompile_config(tuner.configs[0]).kernel.asm["cubin"]
