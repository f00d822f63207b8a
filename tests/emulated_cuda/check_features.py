"""What only CUDA has, on the emulated card: autocast, attention kernels, mixed-order reductions, float8, FlexAttention."""

import warnings
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from autoremat.report.decisions import Decision
from emulated_cuda.steps import ROUNDING, checked, inductors_gradients, on_card, planned_step


class UnderAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 16)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            x = F.gelu(self.first(self.norm(x)))
            for layer in self.layers:
                x = F.gelu(layer(x))
            return self.last(x).float().square().mean()


@pytest.mark.slow
def test_autocast_recomputes_casts_of_parameters():
    module, x = UnderAutocast(), torch.randn(256, 32)
    checked((module, (x,)), torch.float32, rounding=ROUNDING[torch.bfloat16])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = planned_step(module, (x.cuda(),), memory_budget=1, on_infeasible="best_effort").report
    sizes = {2 * p.numel() for p in module.parameters()}  # activations are of other sizes
    casts = [value for value in report.values if "convert_element_type" in value.op and value.bytes in sizes]
    assert casts
    assert any(value.decision is Decision.RECOMPUTED for value in casts)  # the others cost nothing at the peak


class Attention(nn.Module):
    def __init__(self, groups: int, masked: bool, **options: Any) -> None:
        super().__init__()
        self.norm, self.between = nn.LayerNorm(64), nn.Linear(64, 64)
        self.queries = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.keys = nn.ModuleList(nn.Linear(64, 128 // groups) for _ in range(2))
        self.masked, self.options = masked, {**options, "enable_gqa": groups > 1}

    def attend(self, x: Tensor, layer: int) -> Tensor:
        query = self.queries[layer](x).unflatten(-1, (-1, 16)).transpose(1, 2)
        key, value = self.keys[layer](x).unflatten(-1, (2, -1, 16)).permute(2, 0, 3, 1, 4)
        length = x.shape[1]
        mask = torch.ones(length, length, device=x.device, dtype=torch.bool).tril() if self.masked else None
        return F.scaled_dot_product_attention(query, key, value, mask, **self.options).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.between(x + self.attend(self.norm(x), 0)))
        return (x + self.attend(x, 1)).float().square().mean()


VARIANTS = {
    "causal": {"groups": 1, "masked": False, "is_causal": True},
    "grouped, causal, dropout": {"groups": 2, "masked": False, "is_causal": True, "dropout_p": 0.25},
    "mask": {"groups": 1, "masked": True},
}
"""For cuDNN the probability is a multiple of 1/16."""

KERNELS = [
    ("flash", "causal"),
    ("efficient", "mask"),
    *((kernel, "grouped, causal, dropout") for kernel in ("flash", "efficient", "cudnn")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "variant"), KERNELS)
def test_attention_repeats_its_dropout(kernel, variant, monkeypatch):
    monkeypatch.setenv("EMULATED_ATTENTION", kernel)
    options = VARIANTS[variant]
    built = Attention(**options), (torch.randn(2, 32, 64),)
    whole, least = checked(built, torch.bfloat16, has_dropout="dropout_p" in options)
    assert least.result.peak_bytes < whole.result.peak_bytes


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear, self.second, self.third = nn.RMSNorm(64), nn.Linear(64, 64), nn.RMSNorm(64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.gelu(self.second(self.linear(self.first(x))))).float().square().mean()


@pytest.mark.slow
def test_workspaces_of_mixed_order_reductions_are_replayed(monkeypatch):
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    allocated = []
    original = PythonWrapperCodegen.generate_workspace_allocation
    monkeypatch.setattr(
        PythonWrapperCodegen,
        "generate_workspace_allocation",
        lambda wrapper, workspace: (allocated.append(workspace), original(wrapper, workspace))[1],
    )
    with inductor_config.patch({"triton.mix_order_reduction": True, "triton.mix_order_reduction_non_strict_mode": True}):
        checked((Norms(), (torch.randn(2048, 64),)), torch.float32, rounding=1e-4)
    assert allocated


class Float8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        narrow, one = [t.to(torch.float8_e4m3fn) for t in (x, weight)], torch.ones((), device=x.device)
        ctx.save_for_backward(*narrow)
        return torch._scaled_mm(narrow[0], narrow[1].t(), one, one, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        narrow, one = gradient.to(torch.float8_e5m2), torch.ones((), device=gradient.device)
        of_x = torch._scaled_mm(narrow, weight.t().contiguous().t(), one, one, out_dtype=gradient.dtype)
        of_weight = torch._scaled_mm(narrow.t().contiguous(), x.t().contiguous().t(), one, one, out_dtype=gradient.dtype)
        return of_x, of_weight


class InFloat8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64) / 8 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.gelu(Float8.apply(x, weight))
        return x.float().square().sum()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_operands_in_float8_are_saved_with_one_byte():
    built = InFloat8(), (torch.randn(256, 64),)
    module, (x,) = on_card(built, torch.bfloat16)
    # Eager code rounds between two ops, so a value may fall on the other side of a step of 8 bits.
    reference = inductors_gradients(built, torch.bfloat16)
    checked((module, (x,)), torch.bfloat16, reference=reference)
    report = planned_step(module, (x,), memory_budget="1GiB").report
    narrow = [value for value in report.values if value.decision is Decision.SAVED and value.bytes == x.numel()]
    assert narrow
    assert not report.unknown_workspaces


class Flexible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        attended = flex_attention(query, key, value, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.01)
        return self.out(F.gelu(attended.transpose(1, 2).flatten(2))).float().square().mean()


@pytest.mark.slow
def test_flex_attention():
    checked((Flexible(), (torch.randn(1, 128, 64),)), torch.bfloat16, has_dropout=True)
