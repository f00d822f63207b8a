"""Cost models on captured graphs: which op is priced as what, the three models through the backend, and kinds of devices."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from block_models import FeedForward
from models import build
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import autoremat
from autoremat.basics import disk_cache
from autoremat.basics.errors import OptionsError, OptionWarning
from autoremat.capture import capture as capturing
from autoremat.capture.capture import Capture, capture
from autoremat.capture.pricing import Prices, work_of
from autoremat.measure import calibration
from autoremat.planner.cost.device import SPECIALS, Rate, Rates
from autoremat.torch_private import joint_graphs

SPEED = 1e9


def some_rates(speed: float = SPEED) -> Rates:
    return Rates(1e-6, speed, (("float32", speed),))


MEASURED: dict[str, Rates] = {}
"""Rates that the first slow test measures and the later ones share."""


@pytest.fixture(autouse=True)
def known_rates(request, monkeypatch, tmp_path):
    """Rates and times from nowhere, except for slow tests, which measure all of them."""
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path))
    known = MEASURED if request.node.get_closest_marker("slow") else {calibration.device_key(torch.device("cpu")): some_rates()}
    monkeypatch.setattr(calibration, "_known", known)


def captured(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor, fuses: bool = True, rates: Rates | None = None,
    cost_model: str = "roofline",
) -> Capture:  # fmt: skip
    found, prices = [], Prices(cost_model, others=rates)

    def partition(joint, joint_inputs, **keywords):
        number = keywords["num_fwd_outputs"]
        found.append(capture(joint_graphs.prepare_joint(joint, number), number, fuses, prices=prices))
        return joint_graphs.partition_as_torch_does(joint, joint_inputs, **keywords)

    torch.compile(function, backend=aot_autograd(fw_compiler=lambda module, _: module.forward, partition_fn=partition))(*inputs)
    return found[0]


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_both_gradients_of_a_convolution_cost_what_the_forward_costs(groups, transposed):
    kernel, image = weight(8, 8 // groups, 3, 3), weight(2, 8, 6, 6)
    convolve = F.conv_transpose2d if transposed else F.conv2d
    found = captured(lambda scale: convolve(image * scale, kernel, padding=1, groups=groups).sum(), torch.ones(()))
    flops = {op.target.split(".")[1]: op.flops for op in found.graph.ops if "convolution" in op.target}
    assert flops["convolution"] == 2 * 2 * 8 * (8 // groups) * 9 * 36
    assert flops["convolution_backward"] == 2 * flops["convolution"]


@pytest.mark.parametrize(("fuses", "share"), [(True, 3), (False, 1)])
def test_an_op_that_nothing_fuses_is_launched_and_moves_all_its_bytes(fuses, share):
    x = weight(4, 4)
    result = captured(lambda: x.exp().sum(), fuses=fuses)
    number = next(i for i, op in enumerate(result.graph.ops) if "exp" in op.target)
    work = work_of(result.op_nodes[number], result.graph.ops[number], fuses)
    assert work.moved_bytes == 2 * 4 * 16 // share
    assert work.specials == SPECIALS[Rate.EXPONENTIAL] * 16
    assert work.launches is not fuses


def test_a_fused_op_costs_its_share_of_the_traffic_and_a_part_of_that_for_arithmetic():
    x = weight(64, 64)
    rates = some_rates()
    op = next(op for op in captured(lambda: (x.exp() @ x).sum(), rates=rates).graph.ops if "exp" in op.target)
    assert op.seconds == pytest.approx(op.bytes_moved // 3 / SPEED)
    assert op.memory_bound_seconds == pytest.approx(0.9 * op.seconds)


def test_a_device_that_is_not_there_is_priced_by_its_data_sheet(monkeypatch):
    x = weight(4, 4)
    monkeypatch.setattr(calibration, "measurable", lambda device: False)
    found = captured(lambda: (x @ x).sum(), cost_model="calibrated").pricing
    assert (found.cost_model, found.assumed_share) == ("roofline", 1.0)


def trained(cost_model: str, **options: object) -> tuple[torch.Tensor, autoremat.Report]:
    torch.manual_seed(0)
    model = nn.Sequential(*(FeedForward(32) for _ in range(3)))
    x = torch.randn(256, 32)
    options = {"memory_budget": 0.7, "cost_model": cost_model, **options}
    torch.compile(lambda x: model(x).square().mean(), backend="autoremat", options=options)(x).backward()
    return model[0].up.weight.grad, autoremat.reports()[-1]


@pytest.mark.parametrize("cost_model", ["roofline", "calibrated"])
def test_the_report_names_the_cost_model(cost_model):
    _, report = trained(cost_model, compiler="aot_eager")
    assert report.cost_model == cost_model
    assert (report.assumed_share == 1.0) == (cost_model == "roofline")
    assert autoremat.Report.from_json(report.to_json()) == report


@pytest.mark.slow
def test_measured_costs_under_inductor(monkeypatch):
    MEASURED.clear()
    expected, _ = trained("roofline", compiler="aot_eager", memory_budget=None)
    found, report = trained("calibrated")
    torch.testing.assert_close(found, expected)
    assert report.fits
    assert report.cost_model == "calibrated"
    assert report.calibrated_share == pytest.approx(1.0)
    key = calibration.device_key(torch.device("cpu"))
    rates = Rates.from_json(disk_cache.read_text("rates", key) or "")
    calibration._known.clear()
    torch._dynamo.reset()
    again, warm = trained("calibrated")
    torch.testing.assert_close(again, expected)
    assert dataclasses.replace(warm, planning_seconds=report.planning_seconds) == report
    assert calibration._known[key] == rates


@pytest.mark.parametrize("name", ["unet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama"))])
@pytest.mark.parametrize("model", ["roofline", "calibrated"])
def test_no_op_that_moves_bytes_is_free(name, model):
    module, inputs = build(name, **({"layers": 2} if name == "gpt2" else {}))
    result = captured(module, *inputs, cost_model=model)
    price = result.pricing
    assert all(op.seconds > 0 for op in result.graph.ops if op.bytes_moved)
    assert price.calibrated_share + price.assumed_share == pytest.approx(1.0)
    assert price.assumed_share == 1.0 if model == "roofline" else price.assumed_share == 0.0


def loss(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="one of them may be here")
@pytest.mark.parametrize("device", ["xpu:0", torch.device("mps")])
def test_a_device_that_is_not_here_is_refused_before_anything_is_traced(device):
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(OptionsError, match=r"finds no such device here, only cpu\."):
        autoremat.explain(loss, x, device=device, options={"compiler": "aot_eager", "cost_model": "roofline"})
    model = torch.nn.Linear(4, 4)
    with pytest.raises(OptionsError, match=r"finds no such device here, only cpu\."):
        autoremat.device_budget("24GiB", model, torch.optim.SGD(model.parameters()), device=device)


def test_a_device_of_an_unknown_kind_is_planned_for_with_one_warning():
    capturing._warn_of_kind.cache_clear()
    with pytest.warns(OptionWarning, match="xpu is planned as a middling CUDA card"):
        capturing.device_rates(torch.device("xpu"), None)
    capturing.device_rates(torch.device("xpu"), None)
