"""``autoremat.explain``: the backend's plan without a run, for devices here and not, which leaves models as they were."""

import collections
import functools
import types
import warnings

import pytest
import torch
from block_models import Chain
from models import build
from torch import nn
from torch.nn import functional as F

import autoremat
from autoremat.basics.errors import BudgetInfeasible, CaptureError, OptionsError
from autoremat.planner.cost.datasheets import device_memory
from autoremat.report.plots import OURS
from autoremat.report.report import Report
from autoremat.report.text_tables import brief
from autoremat.tools.cuda_kernels import attention_on_cuda

MIB = 1 << 20
EAGER = {"compiler": "aot_eager"}


def Mlp(width: int = 64) -> nn.Module:
    return Chain(3, width, activation=torch.tanh)


def backends_report(model, inputs, options) -> Report:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.BudgetWarning)
        torch.compile(model, backend="autoremat", options=options)(*inputs)
    return autoremat.reports()[-1]


def same_plan(first: Report, second: Report) -> bool:
    return (first.saved, first.values, first.peak_after, first.predicted_peak_bytes, first.lower_bound_seconds) == (
        second.saved, second.values, second.peak_after, second.predicted_peak_bytes, second.lower_bound_seconds,
    )  # fmt: skip


@pytest.mark.parametrize("budget", [None, 0.6, 200_000])
def test_the_plan_is_the_backends(budget):
    model, x = Mlp(), torch.randn(512, 64)
    options = EAGER | {"memory_budget": budget, "on_infeasible": "best_effort"}
    explained = autoremat.explain(model, x, options=options)
    assert same_plan(explained, backends_report(model, (x,), options))
    assert explained.plan is not None
    assert explained.plan.peak_bytes == explained.predicted_peak_bytes


@pytest.mark.slow
def test_under_inductor_it_is_the_plan_that_is_compiled_first():
    model, inputs = build("llama", layers=1)
    options = {"memory_budget": 0.7}
    explained, compiled = autoremat.explain(model, *inputs, options=options), backends_report(model, inputs, options)
    assert explained.baseline_peak_bytes == compiled.baseline_peak_bytes
    assert explained.minimum_peak_bytes <= compiled.minimum_peak_bytes
    assert compiled.replans == 0, "its code keeps to this budget, so that the first plan is the plan of the report"
    assert same_plan(explained, compiled)


def test_the_minimum_is_the_least_that_a_search_finds():
    x, layers = torch.randn(256, 64), [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*layers)

    def loss(x):
        return model(x).square().mean()

    with pytest.raises(BudgetInfeasible) as refused:
        autoremat.explain(loss, x, options=EAGER | {"memory_budget": "1KiB"}, advice=False)
    least = refused.value.minimum_bytes
    explained = autoremat.explain(loss, x, options=EAGER | {"memory_budget": "1GiB"})
    assert explained.minimum_peak_bytes == least
    assert "or less" not in dict(brief(explained))["least possible"]
    front = autoremat.pareto(loss, x, points=3, options=EAGER)
    assert min(point.peak_bytes for point in front if point.family == OURS) == least
    torch.compile(loss, backend="autoremat", options=EAGER | {"memory_budget": "1GiB"})(x).backward()
    compiled = autoremat.reports()[-1]
    assert compiled.minimum_peak_bytes >= least
    is_least = compiled.minimum_is_searched or compiled.minimum_peak_bytes <= compiled.lower_bound_bytes
    assert dict(brief(compiled))["least possible"].endswith("or less") != is_least


@pytest.mark.slow
@pytest.mark.parametrize("of_the_smallest", [0.7, 0.99, 1.0])
def test_it_refuses_what_compiling_refuses_with_the_same_figures(of_the_smallest):
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))))
    x = torch.randn(1024, 32)

    def loss(x):
        return model(x).square().mean()

    with pytest.raises(BudgetInfeasible) as least:
        autoremat.explain(loss, x, options={"memory_budget": 1000}, lower=True)
    assert not least.value.is_simulated
    options = {"memory_budget": int(of_the_smallest * least.value.minimum_bytes)}

    def outcome(run):
        try:
            return run().compiled_peak_bytes
        except BudgetInfeasible as error:
            return "infeasible", error.minimum_bytes
        except torch._dynamo.exc.BackendCompilerFailed as error:
            return "infeasible", error.inner_exception.minimum_bytes

    explained = outcome(lambda: autoremat.explain(loss, x, options=options))
    assert explained == outcome(lambda: backends_report(loss, (x,), options))
    assert (explained == least.value.minimum_bytes) == (of_the_smallest == 1)


@pytest.mark.slow
def test_with_lowering_it_is_what_is_left_in_the_end(monkeypatch):
    layers, x = nn.ModuleList(nn.Linear(64, 64) for _ in range(6)), torch.randn(2048, 64)
    options = {"memory_budget": 0.55}

    def model(x):
        for layer in layers:
            x = x + F.gelu(layer(torch.tanh(x)))
        return x.square().mean()

    before = len(autoremat.reports())
    with monkeypatch.context() as patch:
        patch.setattr("torch._inductor.async_compile.AsyncCompile.cpp_pybinding", None)  # no kernel is compiled
        lowered = autoremat.explain(model, x, options=options, lower=True)
    assert len(autoremat.reports()) == before
    compiled = backends_report(model, (x,), options)
    assert lowered.compiled_peak_bytes == compiled.compiled_peak_bytes <= compiled.budget_bytes
    assert lowered.replans == compiled.replans
    assert same_plan(lowered, compiled)


def test_models_on_the_meta_device_give_the_same_plan():
    x = torch.randn(512, 64)
    real = autoremat.explain(Mlp(), x, options=EAGER | {"memory_budget": 0.9})
    with torch.device("meta"):
        model = Mlp()
    for inputs in (x, x.to("meta")):
        assert same_plan(real, autoremat.explain(model, inputs, options=EAGER | {"memory_budget": 0.9}, device="cpu"))


def test_a_function_over_a_model_and_its_arguments():
    model, x = Mlp(), torch.randn(512, 64)
    direct = autoremat.explain(model, x, options=EAGER)
    for function in (lambda x: model(x), functools.partial(lambda model, x: model(x), model), model.forward):
        report = autoremat.explain(function, x, options=EAGER)
        assert report.predicted_peak_bytes == direct.predicted_peak_bytes
        assert [v.module for v in report.values] == [v.module for v in direct.values]
    assert autoremat.explain(model, x=x, options=EAGER).predicted_peak_bytes == direct.predicted_peak_bytes
    given = autoremat.explain(lambda model, x: model(x), model.to("meta"), x, options=EAGER, device="cpu")
    assert given.predicted_peak_bytes == direct.predicted_peak_bytes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's look at inputs
def test_after_graph_breaks_every_graph_has_a_report():
    model = Mlp()

    def step(x):
        x = torch.tanh(model.layers[0](x))
        torch._dynamo.graph_break()
        return torch.tanh(model.layers[1](torch.sin(x))).square().mean()

    x = torch.randn(256, 64)
    report = autoremat.explain(step, x, options=EAGER | {"memory_budget": 0.9, "on_infeasible": "best_effort"})
    (other,) = report.others
    assert report.baseline_peak_bytes >= other.baseline_peak_bytes
    assert "2 graphs train" in " ".join(report.notes)
    assert "one of 2 graphs that train" in str(report)
    before = len(autoremat.reports())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.BudgetWarning)
        torch.compile(step, backend="autoremat", options=EAGER | {"memory_budget": 0.9, "on_infeasible": "best_effort"})(x)
    compiled = sorted(r.predicted_peak_bytes for r in autoremat.reports()[before:])
    assert compiled == sorted([report.predicted_peak_bytes, other.predicted_peak_bytes])
    assert Report.from_json(report.to_json()) == report


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CUDA device would be asked for its kernels")
def test_a_cuda_card_that_is_not_here():
    def step(query):
        return F.scaled_dot_product_attention(query, query, query, is_causal=True).float().square().mean()

    query = torch.empty(1, 4, 1024, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    report = autoremat.explain(step, query, device="H100-80GB", options=EAGER)
    assert "aten._scaled_dot_product_cudnn_attention.default" in {v.op for v in report.values}
    assert all(v.bytes % 512 == 0 for v in report.values)
    assert "traced on the CPU" in " ".join(report.notes)
    slower = autoremat.explain(step, query, device="T4", options=EAGER)
    assert slower.step_seconds > 3 * report.step_seconds
    assert autoremat.explain(step, query.float().detach().requires_grad_(), device="H100", options=EAGER).values[0].op == (
        "aten._scaled_dot_product_efficient_attention.default"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="free memory would be the device's")
def test_auto_is_what_a_named_card_has_left():
    with torch.device("meta"):
        model = Mlp(1024)
    x = torch.empty(64, 1024, device="meta")
    options = EAGER | {"memory_budget": "auto", "auto_headroom": 0}
    resident = sum(p.numel() * 4 for p in model.parameters()) + x.numel() * 4
    left = device_memory("V100-16GB") - resident
    assert autoremat.explain(model, x, device="V100-16GB", options=options).budget_bytes == left
    with pytest.raises(OptionsError, match="needs a CUDA device"):
        autoremat.explain(model, x, device="cuda", options=options)  # no card is named


def test_what_cannot_be_is_said():
    model, x = Mlp(), torch.randn(512, 64)
    with pytest.raises(OptionsError, match="H100"):
        autoremat.explain(model, x, device="Z9000")
    by_default = autoremat.explain(model, x, device="H100", options=EAGER | {"cost_model": "calibrated"})
    assert (by_default.cost_model, by_default.assumed_share) == ("roofline", 1.0)
    profile = autoremat.profile_step(model, x, memory_budget=0.9, options=EAGER)
    for lower in (False, True):
        with pytest.raises(OptionsError, match="planned by itself"):
            autoremat.explain(model, x, options=EAGER | {"memory_budget": profile}, lower=lower)
    with pytest.raises(OptionsError, match="generates no code"):
        autoremat.explain(model, x, options=EAGER, lower=True)
    with pytest.raises(CaptureError, match="backward"), torch.no_grad():
        autoremat.explain(model, x, options=EAGER)
    with pytest.raises(CaptureError, match="looks at the values"):
        autoremat.explain(lambda x: model(x) if x.sum().item() > 0 else x, x, options=EAGER)


def test_attention_without_a_fused_kernel_is_the_plain_product():
    query, key, value = (torch.randn(2, 4, 8, 6) for _ in range(3))  # a width that no fused kernel takes
    mask = torch.rand(8, 8) > 0.3
    for given in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.5}):
        torch.testing.assert_close(
            attention_on_cuda(query, key, value, **given), F.scaled_dot_product_attention(query, key, value, **given)
        )


def test_gradients_beyond_the_card_are_named_as_such():
    with torch.device("meta"):
        model, x = nn.Linear(2**17, 2**18), torch.zeros(1, 2**17)
    explained = functools.partial(autoremat.explain, lambda x: model(x).sum(), x, device="H100-80GB")
    with pytest.raises(BudgetInfeasible, match="gradients alone take 128.00 GiB") as raised:
        explained(options={"memory_budget": "80GB"})
    assert raised.value.gradient_bytes >= 4 * 2**35
    assert any(occupant.name.startswith("gradient ") for occupant in raised.value.occupants)
    report = explained(options={"memory_budget": 1.0})
    assert "H100-80GB has 78.40 GiB of memory" in "".join(report.notes)


@pytest.mark.slow
def test_what_was_compiled_stays_compiled():
    model, x = Mlp(), torch.randn(8, 64)
    compiled = torch.compile(model, backend="autoremat", options=EAGER)
    compiled(x).backward()
    before = len(autoremat.reports())
    for rows in range(1, 12):  # more than Dynamo's limit of recompilations
        autoremat.explain(model, torch.randn(rows, 64), options=EAGER)
    compiled(x).backward()
    assert len(autoremat.reports()) == before


def test_what_stops_after_a_graph_break_is_noted():
    model = Mlp()

    def step(x):
        loss = model(x)
        if loss.item() > 0:
            return loss
        return loss * 2

    report = autoremat.explain(step, torch.randn(8, 64), options=EAGER)
    assert "what comes later is missing" in " ".join(report.notes)


class Remembering(nn.Module):
    """Keeps what it computes in containers of every sort, and replaces a buffer."""

    def __init__(self, log: list) -> None:
        super().__init__()
        self.linear, self.log, self.losses = nn.Linear(8, 8), log, [1.5]
        self.cache = types.SimpleNamespace(layers={"keys": [torch.ones(1)]})
        self.seen, self.recent, self.counts = {1}, collections.deque([1, 2]), collections.defaultdict(int, a=1)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        self.remember(y)
        return y.exp().sum()

    @torch.compiler.disable
    def remember(self, y: torch.Tensor) -> None:
        self.total = self.total + y.sum(0)
        self.losses.append(y.mean())
        self.log.append(y)
        self.cache.layers["keys"].append(y)
        self.cache.layers["values"] = [y]
        self.cache.newest = y
        self.seen.add(2)
        self.recent.popleft()
        self.counts["b"] += 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # torch 2.11 breaks at the append
def test_explaining_leaves_containers_and_buffers_as_they_were():
    log: list = []
    model, outer = Remembering(log), [3.0]
    total, keys = model.total, list(model.cache.layers["keys"])

    def step(x: torch.Tensor) -> torch.Tensor:
        outer.append(model(x))
        return outer[-1]

    autoremat.explain(step, torch.ones(4, 8), options={"compiler": "aot_eager"})
    assert model.total is total
    assert log == []
    assert outer == [3.0]
    assert model.losses == [1.5]
    assert list(model.cache.layers) == ["keys"]
    assert model.cache.layers["keys"] == keys
    assert not hasattr(model.cache, "newest")
    assert (model.seen, list(model.recent), dict(model.counts)) == ({1}, [1, 2], {"a": 1})
    step(torch.ones(4, 8)).backward()
    assert model.linear.weight.grad is not None


def test_an_option_among_the_arguments_is_told():
    with pytest.raises(CaptureError, match="memory_budget is an option, to be given as options="):
        autoremat.explain(nn.Linear(8, 8), torch.randn(4, 8), memory_budget=0.7)
