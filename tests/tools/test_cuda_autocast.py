"""Autocast, norms and decompositions of CUDA in graphs that are traced without a CUDA device."""

from __future__ import annotations

import pytest
import torch
from emulated_cuda.named import Norms
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import autoremat
from autoremat.tools.cuda_kernels import write_casts
from autoremat.torch_private.named_card import decided_as_on_card

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


def powers(image: Tensor, weight: Tensor | None, device: str | None) -> int:
    """The number of powers in the graph of a norm and of the mean of its squares."""

    def step(image: Tensor) -> Tensor:
        return nn.functional.rms_norm(image, [8], weight).square().mean()

    return [op.target for op in autoremat.explain(step, image, device=device).plan.graph.ops].count("aten.pow.Tensor_Scalar")


def image(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("weight", [None, torch.ones(8)])
def test_the_backward_of_the_card_reads_the_saved_deviation(weight):
    assert powers(image(4, 8), weight, device="H100-80GB") < powers(image(4, 8), weight, device=None)


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")
def test_where_cuda_has_no_kernel_the_norm_is_taken_apart():
    last = image(2, 3, 4, 8).detach().to(memory_format=torch.channels_last).requires_grad_()
    other_type = torch.ones(8, dtype=torch.float64)
    assert powers(last, None, device="H100-80GB") == powers(last, None, device=None)
    assert powers(image(4, 8), other_type, device="H100-80GB") == powers(image(4, 8), other_type, device=None)


def ops(step: nn.Module, *inputs: torch.Tensor, device: str | None) -> list[str]:
    return [op.target for op in autoremat.explain(step, *inputs, device=device).plan.graph.ops]


def test_a_norm_is_scaled_after_it_is_centred_on_the_card():
    step, x = Norms(), torch.randn(2, 4, 8, 8, requires_grad=True)
    assert ops(step, x, device=None).count("aten.neg.default") > ops(step, x, device="H100-80GB").count("aten.neg.default")


def test_a_decomposition_finds_the_card_and_makes_tensors_of_the_cpu():
    found: list[tuple[torch.device, bool]] = []

    def gelu(x, approximate="none"):
        found.append((x.device, x.is_cuda))
        return x * torch.ones(x.shape, device=x.device) + torch.zeros_like(x)

    with FakeTensorMode(), decided_as_on_card():
        x = torch.empty(4)
        traced = make_fx(nn.GELU(), decomposition_table={torch.ops.aten.gelu.default: gelu})(x)
        assert (x.device.type, x.is_cuda) == ("cpu", False)
    assert found == [(torch.device("cuda", 0), True)]
    called = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert len(called) == 4
    assert {node.meta["val"].device.type for node in called} == {"cpu"}
    assert {node.kwargs.get("device", torch.device("cpu")).type for node in called} == {"cpu"}
