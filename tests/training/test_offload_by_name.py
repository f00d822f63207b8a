"""Options and policies that say by name where saved tensors are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import stays
import torch
from oracles import differences, train_step
from torch import nn

import autoremat
from autoremat import ConstraintWarning, OptionsError, host_memory
from autoremat.policies import Forward, Region

EAGER: dict[str, Any] = {"compiler": "aot_eager", "cost_model": "roofline"}
HOST = {**EAGER, "host_memory": 2**30}
SIZE = 512 * 64 * 4
X = torch.randn(512, 64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    torch._dynamo.reset()
    with stays.small_device():
        yield


def trained(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return train_step(torch.compile(model, backend="autoremat", options=options), model, (X,), 0)


def on_host() -> set[str]:
    """The modules whose results the newest plan keeps on the host."""
    plan = autoremat.reports()[-1].plan
    assert all(stay.form == "host" for stay in plan.schedule.stays)
    producers = (plan.graph.ops[plan.graph.values[stay.value].producer] for stay in plan.schedule.stays)
    return {op.module for op in producers}


@pytest.mark.parametrize("budget", [None, 0.7])
def test_named_tensors_wait_on_the_host_under_every_budget(budget):
    model = Net()
    expected = trained(model, **EAGER)
    save = {"layers.1.1": "host", "layers.2.1": "device", "layers.3.1": "host"}
    found = trained(model, **HOST, memory_budget=budget, save=save)
    assert not differences(found, expected)
    named = on_host()
    assert named >= {"layers.1.1", "layers.3.1"}
    assert "layers.2.1" not in named
    if budget != 0.7:  # what is not named stays where the planner wants it
        assert named == {"layers.1.1", "layers.3.1"}
        assert host_memory.statistics("cpu").to_host_bytes == 2 * SIZE


@dataclass(frozen=True)
class OffloadInputs:
    """Recomputes each layer from its input, which waits on the host."""

    def __call__(self, forward: Forward) -> list[Region]:
        return [Region(layer, form="host") for layer in forward.layers]


def test_a_policy_names_forms_for_the_results_of_its_regions():
    model = Net()
    expected = trained(model, **EAGER)
    assert not differences(trained(model, **HOST, policy=OffloadInputs()), expected)
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
