"""The budget of a whole device: its ledger, and the measured peak of all steps."""

import gc
from typing import Any

import pytest
import torch
from measured_optimizers import OPTIMIZERS, Model, bytes_of, row, state_bytes
from processes import group_of
from requests_of_options import request_with
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autoremat
from autoremat.planner.multigraph.device_budget import EARLIER_GRADIENTS, INPUTS, StepPart

UNCOMPILED = {"compiler": "aot_eager", "cost_model": "roofline"}
TOKENS = torch.randint(64, (8, 32))


def test_the_ledger_has_a_row_for_each_kind_of_memory():
    model, ema = Model(), Model()
    model.tied = model.head.weight
    optimizer = torch.optim.AdamW(model.parameters())
    others = {"EMA": ema, "teacher's logits": torch.zeros(10), "cache": "1KiB"}
    budget = autoremat.device_budget("64MiB", model, optimizer, accumulate=4, others=others, reserve="1MiB", context=100)
    parameters = bytes_of(model.parameters())
    sizes = {one.name: one.bytes for one in budget.rows}
    assert sizes["parameters"] == sizes["gradients"] == sizes[EARLIER_GRADIENTS] == parameters
    assert sizes["buffers"] == 256
    assert sizes["EMA"] == parameters + 256
    assert (sizes["teacher's logits"], sizes["cache"], sizes["context and libraries"]) == (40, 1024, 100)
    assert budget.bytes_in(StepPart.FIRST_STEP) == 2 * (parameters + 256) + 40 + 1024 + 100
    assert budget.bytes_in(StepPart.LATER_MICRO_BATCH) > budget.bytes_in(StepPart.LATER_STEP)
    assert budget.budget_bytes == 2**26 - 2**20 - budget.bytes_in(StepPart.LATER_MICRO_BATCH)


def test_gradients_that_hooks_free_have_no_row():
    model = Model(1)
    before = row(autoremat.device_budget("1GiB", model), "gradients").bytes
    model.embed.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert row(autoremat.device_budget("1GiB", model), "gradients").bytes == before
    freed = autoremat.device_budget("1GiB", model, hooks_free_gradients=True)
    assert row(freed, "gradients").bytes == before - bytes_of([model.embed.weight])


@pytest.mark.parametrize("views", [False, True])
def test_the_buckets_of_data_parallelism_count(views):
    with group_of():
        model = DistributedDataParallel(Model(1), gradient_as_bucket_view=views)
        budget = autoremat.device_budget("1GiB", model, torch.optim.AdamW(model.parameters()), accumulate=2)
    gradients = bytes_of(model.parameters())
    assert row(budget, "buckets of DistributedDataParallel").bytes == gradients
    assert ("gradients" in {one.name for one in budget.rows}) is not views


def test_a_sharded_model_counts_its_shard_and_what_is_gathered():
    from torch.distributed.fsdp import fully_shard

    with group_of(2):
        model = Model(2)
        whole, block = bytes_of(model.parameters()), bytes_of(model.blocks[0].parameters())
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for part in model.blocks:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        budget = autoremat.device_budget("1GiB", model, torch.optim.AdamW(model.parameters()))
    assert row(budget, "parameters").bytes == whole // 2
    assert row(budget, "optimizer state after the first step").bytes == pytest.approx(whole, rel=0.01)
    root = whole - 2 * block
    assert row(budget, "gathered parameters of fully_shard").bytes == root + 2 * block + max(root, block)


def test_a_card_by_name_has_its_data_sheets_memory_and_the_defaults_of_cuda():
    with torch.device("meta"):
        model = Model()
    here = autoremat.device_budget("80GB", model, torch.optim.AdamW(model.parameters()))
    card = autoremat.device_budget("H100-80GB", model, torch.optim.AdamW(model.parameters()))
    assert card.total_bytes == int(0.98 * 80 * 2**30)
    assert [any("no device is named" in note for note in one.notes) for one in (here, card)] == [True, False]
    assert row(card, "context and libraries").bytes == 2**29 == card.reserve_bytes
    assert "context and libraries" not in {one.name for one in here.rows}
    copies = "temporaries of the optimizer's later steps"
    assert row(card, copies).bytes > 2 * row(here, copies).bytes  # foreach, by default
    fused = autoremat.device_budget("H100-80GB", model, torch.optim.AdamW(model.parameters(), fused=True))
    assert copies not in {one.name for one in fused.rows}


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"total": "lots"}, "total='lots' is not accepted"),
        ({"total": "4090"}, "Did you mean 'RTX 4090'. Known cards: GB200"),
        ({"total": "24"}, 'Did you mean "24GiB"'),
        ({"total": 80}, 'total=80 is 80 bytes, .* Did you mean "80GiB"'),
        ({"total": "auto"}, "needs a model on a CUDA device"),
        ({"others": {"EMA": object()}}, r"others\['EMA'\]=<object .*> is not accepted"),
    ],
)
def test_values_that_are_not_accepted(keywords, said):
    with pytest.raises(autoremat.OptionsError, match=said):
        autoremat.device_budget(**{"total": "1GiB", "model": nn.Linear(2, 2), **keywords})


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, budget: Any, accumulate: int, **options: Any) -> int:
    """The peak of three steps, in bytes above an empty process."""
    compiled = torch.compile(model, backend="autoremat", options={**UNCOMPILED, "memory_budget": budget, **options})
    compiled(TOKENS.clone()).backward()
    model.zero_grad(set_to_none=True)
    gc.collect()
    assert not state_bytes(optimizer)
    with autoremat.track_peak("cpu") as peak:
        for _ in range(3):
            for _ in range(accumulate):
                (compiled(TOKENS.clone()) / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return peak.bytes + bytes_of(model.parameters()) + bytes_of(model.buffers())


def tight(
    model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int = 1, share: float = 0.3
) -> autoremat.DeviceBudget:
    """The budget of a device with room for a plan that recomputes: ``share`` of the way from the least peak to the baseline."""
    budget = autoremat.device_budget("1GiB", model, optimizer, accumulate=accumulate)
    report = autoremat.explain(model, TOKENS, options={**UNCOMPILED, "memory_budget": budget})
    peak = report.minimum_peak_bytes + share * (report.baseline_peak_bytes - report.minimum_peak_bytes)
    total = max(report.device_ledger.device_bytes(int(peak)), budget.update_bytes + TOKENS.nbytes)
    return autoremat.device_budget(total + budget.reserve_bytes, model, optimizer, accumulate=accumulate)


@pytest.mark.parametrize(
    ("name", "accumulate"), [("AdamW foreach", 1), ("SGD", 3), pytest.param("8-bit Adam", 3, marks=pytest.mark.slow)]
)
def test_the_predicted_peak_of_the_device_is_the_measured_one(name, accumulate):
    model = Model()
    optimizer = OPTIMIZERS[name](model.parameters())
    budget = tight(model, optimizer, accumulate)
    peak = trained(model, optimizer, budget, accumulate)
    report = autoremat.reports()[-1]
    assert report.fits
    assert report.recomputed_ops > 0
    assert report.predicted_device_bytes == pytest.approx(peak, rel=0.03)
    assert peak <= budget.total_bytes
    assert row(report.device_ledger, INPUTS).bytes == TOKENS.nbytes
    assert report.budget_bytes == report.device_ledger.budget_bytes


def test_the_optimizers_step_can_bind():
    model = Model(2, 256)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    budget = tight(model, optimizer, share=0)
    peak = trained(model, optimizer, budget, 1)
    report = autoremat.reports()[-1]
    assert report.device_ledger.binding(report.peak_bytes) is StepPart.LATER_UPDATE
    assert report.predicted_device_bytes == pytest.approx(peak, rel=0.03)
    assert "it binds in the optimizer's later steps" in " ".join(str(report).split())


def test_a_step_that_alone_exceeds_the_device_is_refused_whatever_is_planned():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    whole = autoremat.device_budget("1GiB", model, optimizer)
    needed = whole.update_bytes + whole.reserve_bytes + TOKENS.nbytes
    budget = autoremat.device_budget(needed - TOKENS.nbytes - 1, model, optimizer)
    assert not budget.fits()
    with pytest.raises(autoremat.DeviceTooSmall) as raised:
        autoremat.explain(model, TOKENS, options={**UNCOMPILED, "memory_budget": budget})
    error = raised.value
    assert error.minimum_bytes == needed
    assert error.occupants[0].name == "optimizer state after the first step"
    assert sum(one.bytes for one in error.occupants) == needed
    fused = autoremat.device_budget(needed - 1, model, torch.optim.AdamW(model.parameters(), fused=True))
    fused.of_graph(TOKENS.nbytes, counts_gradients=False).check()


def test_accumulation_that_the_ledger_does_not_have_is_warned_of():
    model = Model()
    budget = autoremat.device_budget("2.7MiB", model, torch.optim.SGD(model.parameters(), lr=0.1))
    compiled = torch.compile(model, backend="autoremat", options={**UNCOMPILED, "memory_budget": budget})
    compiled(TOKENS).backward()
    with pytest.warns(autoremat.BudgetWarning, match="Give device_budget the number: accumulate="):
        compiled(TOKENS)


def test_the_cache_key_has_the_bytes_alone():
    model = Model(1)
    budget = autoremat.device_budget("1GiB", model)
    request = request_with(autoremat.Options(memory_budget=budget))
    assert request.limits.ledger is not None
    same = request_with(autoremat.Options(memory_budget=request.limits.peak_bytes))
    assert request.cache_key() == same.cache_key()
    with pytest.raises(autoremat.OptionsError, match="device_ledger"):
        autoremat.Options.parse({"device_ledger": budget})


def test_max_batch_and_configure_take_a_device_budget():
    model = Model()
    budget = autoremat.device_budget("8MiB", model, torch.optim.AdamW(model.parameters()))
    fit = autoremat.max_batch(lambda n: torch.zeros(n, 32, dtype=torch.long), model, budget, step=32, options=UNCOMPILED)
    assert fit.report.predicted_device_bytes <= 8 * 2**20
    assert fit.report.budget_bytes == budget.budget_bytes - fit.size * 32 * 8
    assert fit.next_minimum_bytes > budget.budget_bytes - fit.next_size * 32 * 8
    autoremat.configure(memory_budget=budget)
    assert autoremat.Options.parse().memory_budget == budget


@pytest.mark.slow
def test_a_step_profile_takes_a_device_budget():
    model = Model()
    budget = autoremat.device_budget("4MiB", model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
    profile = autoremat.profile_step(model, TOKENS, memory_budget=budget, options=UNCOMPILED)
    assert profile.budget_bytes == budget.budget_bytes - TOKENS.nbytes
    assert profile.within(budget).budget_bytes == budget.budget_bytes
    torch.compile(model, backend="autoremat", options={**UNCOMPILED, "memory_budget": profile})(TOKENS).backward()
    report = autoremat.reports()[-1]
    assert report.device_ledger == profile.device_ledger
    assert report.predicted_device_bytes == budget.of_graph(TOKENS.nbytes, False).device_bytes(profile.peak_bytes)


def test_the_peak_of_buckets_that_share_a_budget_is_that_of_the_step():
    with group_of():
        model = DistributedDataParallel(Model(3, 128), bucket_cap_mb=1, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        budget = autoremat.device_budget("32MiB", model, optimizer, accumulate=2)
        compiled = torch.compile(model, backend="autoremat", options={**UNCOMPILED, "memory_budget": budget})
        for _ in range(2):  # the wrapper allocates its buckets anew after the first backward
            compiled(TOKENS.clone()).backward()
            model.zero_grad(set_to_none=True)
        with autoremat.track_peak("cpu") as peak:
            for _ in range(2):
                for _ in range(2):
                    (compiled(TOKENS.clone()) / 2).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    ledger = autoremat.reports()[-1].device_ledger
    assert ledger.step_peak_bytes > 0
    held = sum(row(ledger, name).bytes for name in ("parameters", "buffers", "buckets of DistributedDataParallel"))
    assert autoremat.reports()[-1].predicted_device_bytes == pytest.approx(peak.bytes + held, rel=0.03)
