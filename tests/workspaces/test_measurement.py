"""Kernels without a formula are measured, at their dearest data, and budgets hold for them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_formulas import formula, measured
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from trained_steps import LEAST, trained

import autoremat
from autoremat.planner.cost.datasheets import device_memory
from autoremat.workspaces import measurement
from autoremat.workspaces.formulas import CPU, EXACT_RESULTS

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
WIDTH = 64


def convolution(dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    image, weight = torch.randn(2, 8, 32, 32, dtype=dtype), torch.randn(8, 8, 3, 3, dtype=dtype)
    return lambda x, w: aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), (image, weight)


CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "convolution of float64": convolution(torch.float64),
    "convolution of float16": convolution(torch.float16),
    "product of bfloat16": (torch.mm, (torch.randn(96, 96).bfloat16(), torch.randn(96, 96).bfloat16())),
    "kthvalue": (lambda x: x.kthvalue(3), (torch.randn(64, 64),)),
    "masked_select": (torch.masked_select, (torch.randn(64, 1, 64), torch.ones(64, 64, dtype=torch.bool))),
    "median": (torch.median, (torch.randn(64, 64),)),
    "svdvals": (torch.linalg.svdvals, (torch.randn(64, 48),)),
    "multinomial": (lambda x: x.multinomial(8, True), (torch.rand(64, 64),)),
    "matrix_exp": (torch.matrix_exp, (torch.randn(64, 64),)),
    "attention of float64": (ATTENTION, (torch.randn(1, 2, 1024, 64, dtype=torch.float64),) * 3),
    "attention of float64 in small blocks": (ATTENTION, (torch.randn(2, 4, 256, 32, dtype=torch.float64),) * 3),
    "a conjugated operand": (lambda x: torch.mm(x.conj(), x), (torch.randn(32, 32, dtype=torch.complex64),)),
}
EXPERTS = torch.randn(64, 16).bfloat16(), torch.randn(4, 16, 8).bfloat16()

DEAREST_DATA: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "distinct numbers": (lambda x: aten._unique2(x, True, True, True), (torch.arange(400),)),
    "positions of what is not zero": (aten.nonzero, (torch.arange(400),)),
    "sums by position": (lambda x, i: x.index_add(0, i, x), (torch.randn(64, 8), torch.arange(64))),
    "groups of rows": (aten._grouped_mm, (*EXPERTS, torch.full((4,), 64, dtype=torch.int32))),
}  # fmt: skip
"""Kernels whose memory depends on data. Plans count the dearest."""


@pytest.mark.parametrize("name", CALLS | DEAREST_DATA)
def test_a_kernel_without_a_formula_is_measured(name: str) -> None:
    call, arguments = (CALLS | DEAREST_DATA)[name]
    least = 0 if name in ("product of bfloat16", *DEAREST_DATA) else 1  # some processors need no copy of its operands
    assert least <= measured(call, *arguments) <= formula(call, *arguments)


def measured_call(call: Callable[..., Any], op: Any, *args: torch.Tensor) -> measurement.Measured | None:
    """What is measured of the last call of ``op`` that ``call`` traces."""
    graph = make_fx(call, tracing_mode="fake")(*args).graph
    node = next(n for n in reversed(graph.nodes) if getattr(n.target, "overloadpacket", None) is op)
    return measurement.measured(node, tuple(torch.fx.node.map_arg(node.args, lambda n: n.meta["val"])), {}, node.meta["val"])


def test_a_measurement_is_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    find = functools.partial(measured_call, torch.linalg.qr, aten.linalg_qr, torch.randn(33, 17))
    found = find()
    assert found
    measurement.remember()
    monkeypatch.setattr(measurement, "_known", {})  # as in another process
    monkeypatch.setattr(measurement, "_measure", lambda *_: pytest.fail("measured again"))
    assert find() == found
    monkeypatch.setattr(measurement, "_stored", lambda _: pytest.fail("read again"))
    assert find() == found


def test_a_loss_that_keeps_the_buffer_it_is_the_mean_of_counts_so() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    compiled = torch.compile(
        lambda: F.mse_loss(weight.sin(), weight.detach()), backend="autoremat", options={"compiler": "aot_eager"}
    )
    for _ in range(2):
        weight.grad = None
        with autoremat.track_peak("cpu") as peak:
            loss = compiled()
            loss.backward()
    assert loss.untyped_storage().nbytes() == weight.nbytes  # torch's own doing
    assert peak.bytes <= autoremat.reports()[-1].predicted_peak_bytes < peak.bytes + 1024


def test_measuring_within_a_measured_block_disturbs_neither() -> None:
    with autoremat.track_peak("cpu") as peak:
        assert measured_call(torch.linalg.qr, aten.linalg_qr, torch.randn(35, 17))
        kept = torch.zeros(1000)
    assert peak.bytes >= kept.nbytes


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.depthwise = nn.Conv2d(3, 16, 2, stride=2), nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


def scaled(function: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> tuple[nn.Module, torch.Tensor]:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(shape))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x * self.factor)

    return Scaled(), torch.randn(shape)


def layers(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    convolutions = [nn.Conv2d(8, 8, 3, padding=1, dtype=dtype) for _ in range(3)]
    return nn.Sequential(*(layer for conv in convolutions for layer in (conv, nn.Tanh()))), torch.randn(
        2, 8, 32, 32, dtype=dtype
    )


STEPS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "convolutions of float64": lambda: layers(torch.float64),
    "convolutions of float16": lambda: layers(torch.float16),
    "convnext": lambda: (ConvNext(), torch.randn(4, 3, 64, 64)),
    "embedding bag": lambda: (nn.EmbeddingBag(512, WIDTH), torch.randint(0, 512, (256, 20))),
    "kthvalue": lambda: scaled(lambda x: x.sin().kthvalue(5).values, 128, 128),
    "fft": lambda: scaled(lambda x: torch.fft.fft2(x.sin()).abs(), 4, 64, 64),
    "rfft": lambda: scaled(lambda x: torch.fft.irfft(torch.fft.rfft(x.sin()) * 2).tanh(), 64, 512),
    "solve": lambda: scaled(lambda x: torch.linalg.solve(x.sin() @ x.mT + 10 * torch.eye(48), x), 48, 48),
    "matrix_exp": lambda: scaled(lambda x: torch.matrix_exp(x.sin()), 64, 64),
    "renorm": lambda: scaled(lambda x: x.sin().renorm(2, 0, 1.0), 64, 64),
    "fold": lambda: scaled(lambda x: F.fold(F.unfold(x.sin(), 3), (32, 32), 3), 2, 4, 32, 32),
}


BY_INDUCTOR = ("convnext", "kthvalue", "rfft", "fold")
"""Of kernels that Inductor calls alike, one."""


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize(
    ("name", "inner"),
    [
        *((name, "aot_eager") for name in STEPS),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in BY_INDUCTOR),
    ],
)
def test_a_budget_holds_for_such_kernels(name: str, inner: str) -> None:
    model, x = STEPS[name]()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    with pytest.warns(autoremat.BudgetWarning, match="over its budget"):
        least = trained(loss, model, x, steps=1, **LEAST | {"compiler": inner}).report.peak_bytes
    found = trained(loss, model, x, memory_budget=least, compiler=inner)
    assert found.report.fits
    assert 0.5 * (least - found.report.code_headroom_bytes) < found.peak <= least


def test_an_undeclared_kernel_is_named_and_nothing_is_claimed(caplog: pytest.LogCaptureFixture) -> None:
    @torch.library.custom_op("autoremat_tests::opaque_square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    square.register_fake(torch.empty_like)
    square.register_autograd(lambda ctx, gradient: gradient * 2)
    weight = torch.randn(8, 8, requires_grad=True)
    options = {"memory_budget": "1GiB", "compiler": "aot_eager"}
    torch.compile(lambda: square(weight.sin()).sum(), backend="autoremat", options=options)().backward()
    report = autoremat.reports()[-1]
    assert report.unknown_workspaces == ("autoremat_tests.opaque_square.default",)
    assert report.within_budget
    assert not report.fits
    assert "workspace_bytes" in caplog.text
    assert autoremat.Report.from_json(report.to_json()).unknown_workspaces == report.unknown_workspaces


def test_a_card_that_is_not_here_has_unknown_workspaces_where_no_formula_is() -> None:
    assert device_memory("H100-80GB")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(2, 3, 16, 16)
    model(x)
    report = autoremat.explain(lambda x: model(x).square().mean(), x, options={"memory_budget": 1.0}, device="H100-80GB")
    assert report.unknown_workspaces == ("aten.convolution.default", "aten.convolution_backward.default")
    dense = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    report = autoremat.explain(
        lambda x: dense(x).square().mean(), torch.randn(32, 64), options={"memory_budget": 1.0}, device="H100-80GB"
    )
    assert report.unknown_workspaces == ()
    assert report.fits


WORDS = torch.randint(0, 100, (256, 20))


def bags(width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.embedding_bag(WORDS, x[:, :width], mode="max").square().mean()


def held_folds(x: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(())
    for _ in range(3):
        image = F.fold(x, (32, 32), 3, padding=1)
        total = total + (image @ image.mT).square().mean()
        x = F.unfold(image, 3, padding=1)
    return total


def scanned(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, row: ((c @ row).tanh(), (c + row).sin()), torch.zeros_like(x[0]), x, dim=0)[1].square().mean()


def mapped(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.map import map as torch_map

    return torch_map(lambda row, weight: (row @ weight).tanh().exp() * row, x, torch.ones(64, 64)).square().mean()


DEAREST_STEPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "maxima of bags": (bags(64), (100, 64)),
    "maxima of bags of single numbers": (bags(1), (100, 1)),
    "folds": (held_folds, (2, 36, 1024)),
    "scan": (scanned, (4, 64, 64)),
    "map": (mapped, (2, 64, 64)),
}


@pytest.mark.parametrize("name", DEAREST_STEPS)
def test_the_predicted_peak_covers_a_step(name: str) -> None:
    function, shape = DEAREST_STEPS[name]
    x = torch.randn(shape, requires_grad=True)
    found = trained(function, [], x, memory_budget=1.0)
    assert found.report.fits
    assert 0.6 * found.report.predicted_peak_bytes < found.peak <= found.report.predicted_peak_bytes


@pytest.mark.parametrize("sides", [(64, 16, 8), (1024, 128, 256)])
def test_each_thread_of_a_packed_product_has_a_block(sides: tuple[int, int, int]) -> None:
    rows, inner, columns = sides
    arguments = torch.randn(rows, inner).bfloat16(), torch.randn(2, inner, columns).bfloat16()
    ends, threads = torch.full((2,), rows, dtype=torch.int32), torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            assert measured(aten._grouped_mm, *arguments, ends) <= formula(aten._grouped_mm, *arguments, ends)
    finally:
        torch.set_num_threads(threads)


def exact_calls() -> dict[Any, tuple[torch.Tensor, ...]]:
    heads, rows, stack = torch.randn(1, 2, 64, 16), torch.randn(16, 16), torch.randn(2, 16, 16)
    result, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)
    return {
        aten.mm: (rows, rows), aten.bmm: (stack, stack), aten.addmm: (rows, rows, rows), aten.baddbmm: (stack, stack, stack),
        aten._grouped_mm: (rows.bfloat16(), stack.bfloat16(), torch.tensor([8, 16], dtype=torch.int32)),
        aten._scaled_dot_product_flash_attention_for_cpu: (heads, heads, heads),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            heads, heads, heads, heads, result, logsumexp, 0.0, False,  # type: ignore[dict-item]
        ),
    }  # fmt: skip


@pytest.mark.parametrize("op", [op for op in CPU if op in EXACT_RESULTS], ids=str)
def test_only_ops_without_excess_are_taken_to_have_exact_results(op: Any) -> None:
    found = measured_call(lambda: op(*exact_calls()[op]), op)
    assert found is not None
    assert not any(found.excess)


def test_each_result_has_the_memory_that_its_own_buffer_takes() -> None:
    def call() -> Any:
        words, starts = torch.zeros(12, dtype=torch.long), torch.zeros(4, dtype=torch.long)
        return aten._embedding_bag(torch.ones(12, 8), words, starts, False, 2)

    found = measured_call(call, aten._embedding_bag)
    assert found is not None
    assert [tensor.untyped_storage().nbytes() - tensor.nbytes for tensor in call()] == list(found.excess)
    assert any(found.excess[1:])
