"""Code for CUDA where there is none: what changes of the code generator, what is made of its result, and how it counts."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autoremat import OptionWarning, explain
from autoremat.capture.pricing import product_type
from autoremat.compiler import compile_loop, planned_graph
from autoremat.compiler.lowering import Partitioning, lower
from autoremat.compiler.planning import plan_graph
from autoremat.compiler.problem import Problem
from autoremat.options.options import Options
from autoremat.planner.cost.datasheets import TF32
from autoremat.planner.graph.op import Kind
from autoremat.planner.memory.allocations import HalfAllocations
from autoremat.request.request import Request
from autoremat.torch_private import MINOR, allocator, compilers, inductor_lowering, resolve
from autoremat.workspaces.formulas import SMALL


def drawn_at_once(monkeypatch, patches):
    """Whether kernels may draw four numbers at once while a graph is compiled: in the thread that compiles it, in another."""
    from torch._inductor.codegen.triton import TritonOverrides

    monkeypatch.setattr(TritonOverrides, "_can_use_4x_random", staticmethod(lambda: True), raising=False)
    seen = []

    def compile_nothing(*_, **__):
        other = threading.Thread(target=lambda: seen.append(TritonOverrides._can_use_4x_random()))
        seen.append(TritonOverrides._can_use_4x_random())
        other.start()
        other.join()

    monkeypatch.setattr(compilers, "compile_with_inductor", compile_nothing)
    module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    problem = Problem(module=module, inputs=[torch.zeros(1, 2)], patches=patches)
    lower(problem, Partitioning(problem, plan_graph), (), lambda halves: None)
    assert TritonOverrides._can_use_4x_random()
    return seen


draws_four = pytest.mark.skipif(
    resolve("torch._inductor.codegen.triton:TritonOverrides._can_use_4x_random") is None,
    reason="kernels of this torch draw one number at a time",
)


@draws_four
def test_kernels_of_all_shapes_draw_the_same_numbers(monkeypatch):
    assert drawn_at_once(monkeypatch, {}) == [False, True]


@draws_four
def test_a_setting_that_would_draw_others_is_refused_aloud(monkeypatch):
    with pytest.warns(OptionWarning, match="use_rand4x has no effect"):
        assert drawn_at_once(monkeypatch, {"use_rand4x": True}) == [False, True]


def test_code_for_cuda_graphs_is_generated_without_kernels():
    from torch._inductor.graph import GraphLowering

    generated = []
    with inductor_lowering.without_kernels():
        module = GraphLowering.compile_to_module(SimpleNamespace(codegen=lambda: generated.append("code")))
    assert generated == ["code"]
    module.runner.recursively_apply_fns([len])  # as Inductor does with what is to wrap the partitions


def traced_product():
    traced = make_fx(torch.mm, tracing_mode="fake")(torch.ones(2, 2), torch.ones(2, 2))
    return traced.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)


@pytest.mark.parametrize(("precision", "dtype"), [("highest", "float32"), ("high", TF32)])
def test_float32_products_have_the_rate_of_the_precision_that_is_set(precision, dtype):
    (product,) = traced_product()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert product_type(product) == dtype
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_precision_that_is_set_for_cuda_alone_is_no_error():
    (product,) = traced_product()
    other, products = compilers.float32_precision(), torch.backends.cuda.matmul
    before = products.fp32_precision
    try:
        products.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert compilers.float32_precision() != other
        assert product_type(product) == TF32
        options = {"compiler": "aot_eager", "memory_budget": "1MiB"}
        torch.compile(torch.nn.Linear(4, 4), backend="autoremat", options=options)(torch.ones(2, 4)).sum().backward()
        request, module = Request(Options(cost_model="roofline")), torch.fx.symbolic_trace(torch.nn.Linear(4, 4))
        assert compile_loop.fingerprint(Problem(request, module))
    finally:
        products.fp32_precision = before


def test_a_card_that_is_planned_for_by_name_has_no_habits_of_cpus(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    convolve = torch.nn.Conv2d(4, 4, 3)
    index = torch.tensor([[0, 1]])

    def loss(image):
        logits = convolve(image).sum((2, 3)).scatter_add(1, index, image[:1, 0, 0, :2])
        return torch.nn.functional.cross_entropy(logits, index[:, 0])

    report = explain(loss, torch.randn(1, 4, 8, 8), device="H100-80GB")
    ops = {op.target: op for op in report.plan.graph.ops}
    assert ops["aten.scatter_add.default"].kind is Kind.REDUCTION
    assert ops["aten.scatter_add.default"].workspace_bytes == 0
    assert report.code_headroom_bytes == SMALL  # and none for images laid channels last
    assert [op for op in report.plan.graph.ops[report.plan.graph.num_forward :] if op.target == "aten.sum.dim_IntList"]


@pytest.mark.slow
@pytest.mark.parametrize("replayed", [True, False])
def test_code_that_is_not_replayed_is_said_to_be_estimated(monkeypatch, replayed):
    if not replayed:
        monkeypatch.setattr(inductor_lowering, "replay", lambda *_: None)
    report = explain(
        lambda x: torch.nn.functional.gelu(x).sum(),
        torch.ones(8, requires_grad=True),
        lower=True,
        options={"cost_model": "roofline"},
    )
    assert ("the peak of the code is an estimate" in " ".join(report.notes)) is not replayed


MIB = 2**20


@pytest.mark.parametrize(("text", "rest"), [("", MIB), ("expandable_segments: True", 0)])
def test_rests_of_blocks_count_unless_segments_expand(monkeypatch, text, rest):
    monkeypatch.setattr(planned_graph, "settings_of_process", lambda: text)
    assert planned_graph.code_unsplit_bytes({False: HalfAllocations(((0, 11 * MIB),))}, []) == rest


def test_settings_without_a_rule_are_noted(monkeypatch):
    monkeypatch.setattr(planned_graph, "settings_of_process", lambda: "max_split_size_mb:64")
    assert "without max_split_size_mb" in planned_graph.note_on_settings("cuda")
    assert not planned_graph.note_on_settings("cpu")


@pytest.mark.skipif(MINOR < 12, reason="this torch does not tell the settings")
@pytest.mark.parametrize("own", ["", "expandable_segments:True"])
def test_settings_of_the_process_come_before_those_of_the_environment(monkeypatch, own):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: own, raising=False)
    assert allocator.settings_of_process() == (own or "max_split_size_mb:64")
