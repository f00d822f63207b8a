"""Cards by name multiply each type at its own rate, also within one graph."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import autoremat
from autoremat.capture.kernel_shapes import product_type, shapes_of
from autoremat.planner.cost import TF32, Product

aten = torch.ops.aten


def seconds_of(function, *inputs, device="H100-80GB"):
    plan = autoremat.explain(function, *inputs, device=device, options={"compiler": "aot_eager"}).plan
    return {op.name: op.seconds for op in plan.graph.ops}


def test_a_float32_product_beside_a_16_bit_one_has_its_own_rate():
    wide = torch.empty(4096, 4096, device="meta", requires_grad=True)
    found = seconds_of(lambda x, y: torch.mm(x, x).sum() + torch.mm(y, y).float().sum(), wide, wide.bfloat16())
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
