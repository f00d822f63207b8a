"""Saved tensors on the host and as bits: budgets of small models, names, stored plans, and steps of several graphs."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import stays
import torch
from block_models import ROWS, WIDTH, Broken, Chain, Layered, MeanSquare
from offload_cells import BUDGETS, MODELS, STORES, Cells
from oracles import same_bits
from processes import group_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from trained_steps import EAGER, compiled, gradients, measured, trained

import autoremat
from autoremat import BudgetWarning, ConstraintWarning, OptionsError, OptionWarning, PlanFileError, track_peak
from autoremat.planner.multigraph.step_profile import StepProfile
from autoremat.policies import Forward, Region
from autoremat.report.decisions import Decision
from autoremat.step_profile.blocks import CompiledBlocks

# Dynamo looks at `.grad` of what it is handed after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

AMPLE, TIGHT = 2**30, 200_000


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    with stays.small_device():
        yield


def check(model: nn.Module, step: Any, inputs: torch.Tensor, budget: int, host: int, planned: int | None) -> None:
    """Runs a step, and compares both peaks with their bounds and the bytes on the host with the plans."""
    _, peak = measured(step, model, inputs)
    now = stays.statistics("cpu")
    assert peak <= budget
    assert 0 < now.held_bytes <= host
    assert planned is None or now.held_bytes == planned
    assert now.used_bytes == 0


def cheaper(profile: StepProfile, plain: StepProfile, host: int) -> None:
    """Checks that bytes on the host save recomputation, and keep to their bound."""
    assert profile.added_seconds < plain.added_seconds
    assert profile.peak_bytes <= profile.budget_bytes
    assert 0 < profile.host_peak_bytes <= host


@pytest.mark.parametrize("host", [AMPLE, TIGHT])
def test_blocks_share_the_host(host):
    model, inputs = Layered(8), torch.randint(0, 50, (ROWS,))
    expected = gradients(model, model, inputs)

    def planned(**options: object) -> CompiledBlocks:
        blocks = autoremat.compile_blocks(model.layers, 1.0, options=EAGER | options)
        for _ in range(3):
            gradients(model, model, inputs)
        return blocks

    plain = planned().profile
    blocks = planned(host_memory=host)
    budget = plain.minimum_peak_bytes
    profile = blocks.within(budget)
    cheaper(profile, plain.within(budget), host)
    before = 2 * ROWS * WIDTH * 4  # the embedding's result, which no block sees, and its gradient
    check(model, model, inputs, budget + before, host, profile.host_peak_bytes)
    assert all(same_bits(a, b) for a, b in zip(gradients(model, model, inputs), expected, strict=True))


def test_graphs_of_a_broken_function_share_the_host():
    model, inputs = Broken(2), torch.randn(ROWS, WIDTH)
    options = {**EAGER, "host_memory": TIGHT}
    plain = autoremat.profile_step(model, inputs, options=EAGER)
    budget = (plain.minimum_peak_bytes + plain.baseline_peak_bytes) // 2
    profile = autoremat.profile_step(model, inputs, memory_budget=budget, options=options)
    cheaper(profile, plain.within(budget), TIGHT)
    step = torch.compile(model, backend="autoremat", options={**options, "memory_budget": profile})
    check(model, step, inputs, budget, TIGHT, None)


def test_buckets_share_the_host():
    class Layers(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for up, down in zip(self[::2], self[1::2], strict=True):
                hidden = up(x)
                x = x + torch.tanh(down(hidden * torch.sigmoid(torch.exp(-hidden * hidden))))
            return x.square().mean()

    with group_of():
        sizes = [(256, 1024), (1024, 256)] * 3
        model, inputs, host = Layers(nn.Linear(*size) for size in sizes), torch.randn(512, 256), 16 * 2**20
        wrapped = DistributedDataParallel(model, bucket_cap_mb=4, gradient_as_bucket_view=True)
        options = {**EAGER, "memory_budget": 0.6, "host_memory": host}
        step = torch.compile(wrapped, backend="autoremat", options=options)
        first = len(autoremat.reports())
        step(inputs).backward()
        step(inputs).backward()
        reports = autoremat.reports()[first:]
        assert len(reports) > 1
        assert all("share one budget" in str(report.notes) for report in reports)
        (shared,) = {report.notes[0].partition("budget of ")[2].partition(",")[0] for report in reports}
        budget = int(float(shared.removesuffix(" MiB")) * 2**20)
        check(wrapped, step, inputs, budget + 2**14, host, sum(report.host_peak_bytes for report in reports))


def test_calls_in_flight_share_the_host():
    model, inputs = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))), torch.randn(256, 64)
    _, *expected = gradients(lambda x: model(x).square().mean(), model, inputs)
    options = {**EAGER, "memory_budget": 0.5, "in_flight": 3, "host_memory": AMPLE, "store": ("device", "host")}
    step = torch.compile(lambda x: model(x).square().mean(), backend="autoremat", options=options)
    model.zero_grad(set_to_none=True)
    with track_peak("cpu") as peak:
        losses = [step(inputs) for _ in range(3)]
        for loss in losses:
            loss.backward()
    report = autoremat.reports()[-1]
    assert peak.bytes <= report.peak_bytes + sum(p.nbytes for p in model.parameters())  # gradients accumulate beside the calls
    assert report.host_peak_bytes == 3 * report.moved_bytes == stays.statistics("cpu").held_bytes > 0
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 3 * gradient)


@pytest.mark.parametrize("model", MODELS)
def test_all_forms_at_the_least_budget(model):
    assert Cells(model, "aot_eager").check("both", "least").host_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MODELS)))
@pytest.mark.parametrize("store", STORES)
def test_single_forms_at_several_budgets(number, store):
    Cells(list(MODELS)[number], "aot_eager").check(store, BUDGETS[number % len(BUDGETS)])


@pytest.mark.slow
def test_generated_code_keeps_its_budgets_too():
    Cells("gated", "inductor").check("both", "middle")


HOST = {**EAGER, "host_memory": 2**30}
SIZE = 512 * 64 * 4
X = torch.randn(512, 64)


def Net() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
    return MeanSquare(*layers)


def on_host() -> set[str]:
    """The modules whose results the newest plan keeps on the host."""
    plan = autoremat.reports()[-1].plan
    assert all(stay.form == "host" for stay in plan.schedule.stays)
    producers = (plan.graph.ops[plan.graph.values[stay.value].producer] for stay in plan.schedule.stays)
    return {op.module for op in producers}


@pytest.mark.parametrize("budget", [None, 0.7])
def test_named_tensors_wait_on_the_host_under_every_budget(budget):
    model = Net()
    expected = trained(model, model, X, steps=1).tensors
    save = {"layers.1.1": "host", "layers.2.1": "device", "layers.3.1": "host"}
    found = trained(model, model, X, steps=1, **HOST, memory_budget=budget, save=save).tensors
    assert all(map(same_bits, found, expected))
    named = on_host()
    assert named >= {"layers.1.1", "layers.3.1"}
    assert "layers.2.1" not in named
    if budget != 0.7:  # what is not named stays where the planner wants it
        assert named == {"layers.1.1", "layers.3.1"}
        assert stays.statistics("cpu").to_host_bytes == 2 * SIZE


@dataclass(frozen=True)
class OffloadInputs:
    """Recomputes each layer from its input, which waits on the host."""

    def __call__(self, forward: Forward) -> list[Region]:
        return [Region(layer, form="host") for layer in forward.layers]


def test_a_policy_names_forms_for_the_results_of_its_regions():
    model = Net()
    expected = trained(model, model, X, steps=1).tensors
    assert all(map(same_bits, trained(model, model, X, steps=1, **HOST, policy=OffloadInputs()).tensors, expected))
    assert on_host() == {f"layers.{number}.3" for number in range(4)}


def test_a_name_and_a_chosen_plan_keep_to_one_bound():
    model, bound = Net(), 3 * SIZE
    options = {**EAGER, "memory_budget": 0.7, "host_memory": bound, "save": {"layers.1.1": "host"}}
    report = autoremat.explain(model, X, options=options)
    assert SIZE < report.host_peak_bytes <= bound


def test_too_little_host_memory_is_an_error_that_names_the_largest_tensor():
    with pytest.raises(
        OptionsError, match=rf"keeps 2 tensors on the host, the largest of them .*Raise host_memory to {2 * SIZE}"
    ):
        autoremat.explain(Net(), X, options={**EAGER, "host_memory": SIZE, "save": {"layers.[12].1": "host"}})


def test_a_tensor_that_cannot_have_the_form_causes_a_warning():
    with pytest.warns(
        ConstraintWarning, match=r"1 of the named tensors cannot be kept in the form 'bits' and stay on the device: tanh.*only"
    ):
        autoremat.explain(Net(), X, options={**HOST, "save": {"layers.2.1": "bits"}})


def test_a_bit_form_needs_store():
    with pytest.raises(OptionsError, match=r"save=\{'a': 'bits'\} names a form that is not allowed: allowed are \['device'\]"):
        autoremat.Options(save={"a": "bits"})
    with pytest.raises(OptionsError, match="^save="):
        autoremat.Options(save={"a": "disk"})
    kept = autoremat.Options(save={"a": "device", "b": "bits"}, store=("device", "bits"))
    assert autoremat.Options(save=kept.save, store=kept.store) == kept


class Kept(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


KEPT, LONG = Kept(8, 64, activation=torch.tanh), torch.randn(4096, 64)


def test_nothing_waits_on_the_host_under_compiled_autograd():
    with torch._dynamo.config.patch(compiled_autograd=True):
        step = compiled(KEPT, memory_budget=1.0, host_memory="1GiB")
        with pytest.warns(BudgetWarning), pytest.warns(OptionWarning, match="under compiled autograd"):
            step(LONG).backward()


def test_a_stored_plan_needs_the_host_memory_that_it_takes():
    budget = int(0.9 * autoremat.explain(KEPT, LONG, options=EAGER).minimum_peak_bytes)
    plan = trained(KEPT, KEPT, LONG, steps=1, memory_budget=budget, host_memory="32MiB").report.plan
    held = plan.timeline.host_bytes
    assert trained(KEPT, KEPT, LONG, steps=1, plan=plan, host_memory=held).report.host_peak_bytes == held
    with pytest.raises(PlanFileError, match=f'keeps .* on the host, and host_memory allows .*: raise it to "{held}B"'):
        autoremat.explain(KEPT, LONG, options=EAGER | {"plan": plan, "host_memory": held - 1})


def test_masks_are_kept_as_bits_if_the_option_allows_it():
    model = Chain(8, 64, activation=lambda x: torch.dropout(x.tanh(), 0.3, True))
    least = autoremat.explain(model, LONG, options=EAGER).minimum_peak_bytes
    stores = ("device",), ("device", "bits")
    outcomes = [trained(model, model, LONG, memory_budget=least, store=store) for store in stores]
    assert all(map(same_bits, *(outcome.tensors for outcome in outcomes)))
    plain, packed = (outcome.report for outcome in outcomes)
    assert packed.recompute_seconds + packed.stall_seconds < plain.recompute_seconds
    (form,) = {(form.name, form.host_bytes) for form in packed.plan.schedule.forms(packed.plan.graph).values()}
    assert form == ("bits", 0)
    assert stays.bytes_on_device(packed) == stays.bytes_of_stays(packed) // 8
    assert {value.decision for value in packed.values} >= {Decision.PACKED, Decision.SAVED}
    assert outcomes[1].peak <= packed.peak_bytes <= least
