"""The shapes and types of library kernels that a traced graph calls, and the memory of results that no op reads."""

from collections.abc import Callable

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from trained_steps import trained
from wrapper_sources import replay_peak

import autoremat
from autoremat.capture.pricing import product_type, shapes_of
from autoremat.planner.cost.datasheets import TF32
from autoremat.planner.cost.device import Attention, AttentionKernel, Product

aten = torch.ops.aten


def shape_of(call, *sizes):
    """Returns the shapes of the last library kernel that ``call`` traces for tensors of the ``sizes``."""
    traced = make_fx(call, tracing_mode="fake")(*(torch.zeros(size) for size in sizes))
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    return next(found for node in reversed(calls) if (found := shapes_of(node)))


@pytest.mark.parametrize(
    ("call", "sizes", "product"),
    [
        (torch.mm, [(3, 5), (5, 7)], Product(3, 7, 5)),
        (torch.addmm, [(7,), (3, 5), (5, 7)], Product(3, 7, 5)),
        (torch.bmm, [(2, 3, 5), (2, 5, 7)], Product(3, 7, 5, 2)),
        (torch.conv2d, [(2, 16, 10, 10), (32, 16, 3, 3)], Product(2 * 8 * 8, 32, 16 * 9)),
        (torch.conv_transpose2d, [(2, 16, 8, 8), (16, 32, 3, 3)], Product(2 * 8 * 8, 16, 32 * 9)),
        (lambda x, w: torch.conv2d(x, w, groups=2), [(2, 32, 8, 8), (16, 16, 1, 1)], Product(2 * 64, 8, 16, 2)),
    ],
)
def test_products_and_convolutions(call, sizes, product):
    assert shape_of(call, *sizes) == (product,)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    def forward(query, key, value):
        return aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal)[0]

    sizes = [(2, 4, 96, 64), (2, 4, 128, 64), (2, 4, 128, 64)]
    assert shape_of(forward, *sizes) == Attention(64, 128, causal, kernel=AttentionKernel.AMPERE)

    def on_cpu(query, key, value):
        query.requires_grad_()
        return torch.autograd.grad(
            aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)[0].sum(), query
        )

    assert shape_of(on_cpu, *[(2, 4, 128, 64)] * 3) == Attention(64, 128, causal, backward=True, kernel=AttentionKernel.AMPERE)


def test_a_float32_product_beside_a_16_bit_one_has_its_own_rate():
    wide = torch.empty(4096, 4096, device="meta", requires_grad=True)

    def loss(x, y):
        return torch.mm(x, x).sum() + torch.mm(y, y).float().sum()

    report = autoremat.explain(loss, wide, wide.bfloat16(), device="H100-80GB", options={"compiler": "aot_eager"})
    found = {op.name: op.seconds for op in report.plan.graph.ops}
    assert found["mm"] > 8 * found["mm_1"]


def test_convolutions_may_round_where_products_may_not():
    image, weight = torch.zeros(1, 8, 8, 8), torch.zeros(8, 8, 3, 3)
    traced = make_fx(lambda x, w: torch.mm(torch.conv2d(x, w)[0, 0], x[0, 0, :6]), tracing_mode="fake")(image, weight)
    types = [product_type(node) for node in traced.graph.nodes if node.target in (aten.convolution.default, aten.mm.default)]
    assert types == [TF32, "float32"]


def test_a_float8_product_has_its_shape_and_its_rate():
    def scaled(x, y, scale):
        return torch._scaled_mm(x, y.t(), scale, scale, out_dtype=torch.bfloat16)

    x, y = (torch.zeros(side, 64, dtype=torch.float8_e4m3fn) for side in (32, 48))
    traced = make_fx(scaled, tracing_mode="fake")(x, y, torch.ones(()))
    (product,) = traced.graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    assert shapes_of(product) == (Product(32, 48, 64),)
    assert product_type(product) == "float8_e4m3fn"


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "values of a sort": lambda y: torch.sort(y, dim=-1).values,
    "indices of a sort": lambda y: torch.sort(y, dim=-1).indices.float(),
    "cumulative maximum": lambda y: torch.cummax(y, -1).values,
    "maxima of fractional windows": lambda y: F.fractional_max_pool2d(y.reshape(1, 2, 1024, 512), 2, output_size=256),
    "singular values": lambda y: torch.linalg.svd(y[:512, :512]).S,
    "eigenvalues": lambda y: torch.linalg.eigh(y[:512, :512]).eigenvalues,
    "determinant": lambda y: torch.linalg.slogdet(y[:512, :512]).logabsdet,
}
QUICK = ("values of a sort", "eigenvalues")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS])
def test_the_counted_peak_covers_results_that_no_op_reads(name: str) -> None:
    x, weight = torch.randn(1024, 64), torch.randn(64, 1024, requires_grad=True)

    def loss() -> Tensor:
        y = x @ weight
        return y.square().sum() + FUNCTIONS[name](y.detach()).mean()  # without a gradient

    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        found = trained(loss, [weight], memory_budget=1.0, compiler="inductor")
    assert found.peak <= found.report.peak_bytes


CODE = """
def call(args):
    buf0 = torch.ops.aten.sort.default(arg0)
    buf1 = buf0[0][0]
    del buf0
    buf3 = empty_strided_cpu((4,), (1,), torch.float32)
    return (buf1, buf3)
"""


@pytest.mark.parametrize(("results", "expected"), [((), 16 + 16), (("buf1", "buf2"), 16 + 32)])
def test_the_replay_frees_them_with_the_tuple_of_results(results: tuple[str, ...], expected: int) -> None:
    sizes = {"buf1": 16, "buf2": 32}
    found = replay_peak(CODE, {}, lambda name: sizes.get(name, 0), results=lambda name: results if name == "buf0" else ())
    assert found == expected
