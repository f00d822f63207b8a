"""Code for CUDA devices that are known by name: explain, pareto and max_batch with lower=True, without a CUDA device."""

import models
import pytest
import torch
from captured import generated
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autoremat
from autoremat.basics.errors import OptionsError
from autoremat.planner.cost.datasheets import UNKNOWN_GPU
from autoremat.torch_private import named_card

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here"),
    pytest.mark.skipif(not named_card.generates_triton(), reason="no triton"),
]

CARD = "H100-80GB"


class Block(nn.Module):
    """Two linear layers with a layer norm, a constant, and a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([0.5, 2.0], device=x.device)
        return (self.layers(x).square().mean() * weights).sum()


def step(size: int = 512) -> tuple[nn.Module, torch.Tensor]:
    return Block(), torch.randn(size, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("last", [(), ("image",), ("weight",)])
def test_convolutions_have_the_memory_format_of_cudnn(last, dtype):
    """Channels last if an operand has them, as `cudnn_conv_suggest_memory_format` says; else each would be copied."""
    shapes = {"image": (2, 8, 16, 16), "weight": (4, 8, 3, 3)}
    with named_card.generating_for(UNKNOWN_GPU, CARD), FakeTensorMode(), torch.no_grad():
        image, weight = (
            torch.empty(shape, dtype=dtype, device="cuda").to(
                memory_format=torch.channels_last if name in last else torch.contiguous_format
            )
            for name, shape in shapes.items()
        )
        result = torch.ops.aten.convolution(image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert result.is_contiguous(memory_format=torch.channels_last) == (bool(last) and dtype is torch.bfloat16)


@pytest.mark.slow
def test_the_code_is_of_the_card_and_nothing_stays_changed():
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties

    def answers():
        functions = [getattr(torch.cuda, n) for n in ("get_device_properties", "get_device_capability", "current_device")]
        properties = vars(DeviceProperties)["create"]
        return [*functions, device_interface.get_interface_for_device("cuda"), scheduler.has_triton, properties]

    before, (model, x) = answers(), step()
    with generated() as halves:
        report = autoremat.explain(model, x, device=CARD, lower=True)
    assert answers() == before
    assert not torch.cuda.is_available()
    assert report.compiled_peak_bytes is not None
    assert 0.5 <= report.compiled_peak_bytes / report.predicted_peak_bytes <= 1.1
    assert len(halves) == 2
    for source, _ in halves:
        assert "async_compile.triton(" in source
        assert "major=9" in source
        assert "= empty_strided_cpu(" not in source
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), [("gpt2", {"layers": 2}), ("resnet", {}), ("unet", {}), ("lstm", {})])
def test_models_have_code_for_the_card(name, sizes):
    module, inputs = models.build(name, **sizes)
    report = autoremat.explain(module, *inputs, device=CARD, lower=True, options={"memory_budget": 0.8})
    assert report.compiled_peak_bytes is not None
    assert report.compiled_peak_bytes <= report.budget_bytes


def test_what_cannot_be_lowered_is_said(monkeypatch):
    model, x = step()
    with pytest.raises(OptionsError, match="generates no code"):
        autoremat.explain(model, x, device=CARD, lower=True, options={"compiler": "aot_eager"})
    with pytest.raises(OptionsError, match="only beside such a card"):
        autoremat.explain(model, x, device="MI300X", lower=True)
    monkeypatch.setattr(named_card, "generates_triton", lambda: False)
    with pytest.raises(OptionsError, match="pip install triton"):
        autoremat.explain(model, x, device=CARD, lower=True)
