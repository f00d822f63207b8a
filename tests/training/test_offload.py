"""Saved tensors on the host, from the option to the step that runs, on a CPU that stands for an accelerator; their report."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import stays
import torch
from block_models import Chain
from oracles import differences, train_step
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autoremat
from autoremat import BudgetWarning, OptionWarning, PlanFileError, track_peak
from autoremat.report.decisions import Decision

ROOFLINE = {"cost_model": "roofline"}


class Kept(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


@pytest.fixture
def device() -> Iterator[None]:
    with stays.small_device():
        yield


MODEL, X = Kept(8, 64, activation=torch.tanh), torch.randn(4096, 64)


def least_by_recomputation(compiler: str) -> int:
    report = autoremat.explain(MODEL, X, options={**ROOFLINE, "compiler": compiler})
    return report.minimum_peak_bytes + report.code_headroom_bytes


def trained(**options: Any) -> tuple[Any, Any]:
    """The compiled model after a step, and the outcome of a second one."""
    torch._dynamo.reset()
    compiled = torch.compile(MODEL, backend="autoremat", options={**ROOFLINE, **options})
    train_step(compiled, MODEL, (X,), 0)
    return compiled, train_step(compiled, MODEL, (X,), 1)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_budget_that_recomputation_alone_cannot_keep_is_kept_with_host_memory(device, compiler):
    budget, allowed = int(0.9 * least_by_recomputation(compiler)), 32 * 2**20
    _, expected = trained(compiler=compiler)
    compiled, found = trained(compiler=compiler, memory_budget=budget, host_memory=allowed)
    if compiler == "aot_eager":
        assert not differences(found, expected)
    torch.testing.assert_close(found.tensors, expected.tensors)
    report, before = autoremat.reports()[-1], stays.statistics("cpu")
    MODEL.zero_grad(set_to_none=True)
    with track_peak() as peak:
        compiled(X).backward()
    done = stays.statistics("cpu")
    assert peak.bytes <= report.peak_bytes <= budget
    assert report.moved_bytes == done.to_host_bytes - before.to_host_bytes > 0
    assert report.moved_bytes == done.from_host_bytes - before.from_host_bytes
    assert report.host_peak_bytes == done.held_bytes <= allowed
    assert done.used_bytes == 0
    offloaded = [value for value in report.values if value.decision is Decision.OFFLOADED]
    assert sum(value.bytes for value in offloaded) == report.moved_bytes


def test_nothing_waits_on_the_host_under_compiled_autograd(device):
    options = {**ROOFLINE, "compiler": "aot_eager", "memory_budget": 1.0, "host_memory": "1GiB"}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(MODEL, backend="autoremat", options=options)
        with pytest.warns(BudgetWarning), pytest.warns(OptionWarning, match="under compiled autograd"):
            compiled(X).backward()


def test_a_stored_plan_needs_the_host_memory_that_it_takes(device):
    budget = int(0.9 * least_by_recomputation("aot_eager"))
    trained(compiler="aot_eager", memory_budget=budget, host_memory="32MiB")
    plan = autoremat.reports()[-1].plan
    held = plan.timeline.host_bytes
    trained(compiler="aot_eager", plan=plan, host_memory=held)
    assert autoremat.reports()[-1].host_peak_bytes == held
    with pytest.raises(PlanFileError, match=f'keeps .* on the host, and host_memory allows .*: raise it to "{held}B"'):
        autoremat.explain(MODEL, X, options={**ROOFLINE, "compiler": "aot_eager", "plan": plan, "host_memory": held - 1})


def test_masks_are_kept_as_bits_if_the_option_allows_it(device):
    model = Chain(8, 64, activation=lambda x: torch.dropout(x.tanh(), 0.3, True))
    options = {**ROOFLINE, "compiler": "aot_eager"}
    least = autoremat.explain(model, X, options=options).minimum_peak_bytes
    outcomes = []
    for store in (("device",), ("device", "bits")):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="autoremat", options={**options, "memory_budget": least, "store": store})
        outcomes.append(train_step(compiled, model, (X,), 1))
    assert not differences(*outcomes)
    plain, packed = autoremat.reports()[-2:]
    assert packed.recompute_seconds + packed.stall_seconds < plain.recompute_seconds
    (form,) = {(form.name, form.host_bytes) for form in packed.plan.schedule.forms(packed.plan.graph).values()}
    assert form == ("bits", 0)
    assert stays.bytes_on_device(packed) == stays.bytes_of_stays(packed) // 8
    assert {value.decision for value in packed.values} >= {Decision.PACKED, Decision.SAVED}
    model.zero_grad(set_to_none=True)
    with track_peak() as peak:
        compiled(X).backward()
    assert peak.bytes <= packed.peak_bytes <= least
