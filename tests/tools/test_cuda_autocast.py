"""Autocast, norms and decompositions of CUDA in graphs that are traced without a CUDA device."""

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from autoremat.tools.cuda_kernels import write_casts

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="autocast itself acts here"),
    pytest.mark.filterwarnings("ignore:CUDA is not available"),
]


def results(function, *inputs: torch.Tensor):
    """Returns the results of the graph that Dynamo captures of ``function``, with the casts of autocast on CUDA."""
    captured: list[fx.GraphModule] = []

    def keep(module, _):
        captured.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep)(*inputs)
    (module,) = captured
    write_casts(module.graph)
    module.recompile()
    return module(*inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_op_runs_in_its_type(dtype):
    def step(x, w, label):
        with torch.autocast("cuda", dtype):
            product = F.linear(x, w)
            as_method = x.matmul(w)
            scores = product.softmax(-1)
            total = product.sum()
            mixed = torch.addcmul(x, product, product)
            loss = F.cross_entropy(product, label)
            logarithm = F.cross_entropy(product.float(), label)
        return product, as_method, scores, total, mixed, loss, logarithm, product + 1, F.linear(x, w)

    x, w, label = torch.randn(4, 4), torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)
    half, single = dtype, torch.float32
    wanted = [half, half, single, single, single, single, single, half, single]
    product, *others = results(step, x, w, label)
    assert [product.dtype, *(other.dtype for other in others)] == wanted
    assert torch.equal(product, F.linear(x.to(dtype), w.to(dtype)))
    # The logarithms of the softmax are rounded to 16 bits before their mean.
    assert torch.equal(others[4], F.nll_loss(F.log_softmax(product, 1).float(), label))


def test_regions_that_switch_it_off_and_double_precision_stay():
    def step(x, w, wide):
        with torch.autocast("cuda", torch.bfloat16):
            with torch.autocast("cuda", enabled=False):
                inside = F.linear(x, w)
            return inside, F.linear(x, w), F.linear(wide, wide)

    found = results(step, torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4, dtype=torch.float64))
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.bfloat16, torch.float64]
