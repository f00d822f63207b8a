"""Policies as options: written as text, told from one another, with the modules they speak of. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from folders import ROOT
from requests_of_options import key_of

import autoremat
from autoremat.basics.errors import OptionsError
from autoremat.planner.constraints import policies
from autoremat.planner.constraints.policies import Forward, Region
from autoremat.planner.search import pareto_front


@dataclass(frozen=True)
class Odd:
    """The layers with odd numbers."""

    def __call__(self, forward: Forward) -> Sequence[Region]:
        return [Region(layer) for layer in forward.layers[1::2]]


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("full", policies.Full()),
        ("uniform:3", policies.Uniform(3)),
        ("selective", policies.Selective()),
        ("selective:mlp, *.norm1", policies.Selective(("mlp", "*.norm1"))),
        ("none", None),
        (Odd(), Odd()),
    ],
)
def test_policies_may_be_written_as_text(text, policy):
    assert policies.parse(text) == policy


@pytest.mark.parametrize("name", [*policies.FIXED, *policies.COUNTED])
def test_every_policy_that_has_a_name_is_compared_documented_and_public(name):
    compared = {label.partition(":")[0] for label, _ in pareto_front.POLICIES} | {"block"}  # its number depends on the graph
    assert name in compared
    page = (ROOT / "docs" / "policies.md").read_text()
    assert f'| `"{name}"` |' in page or f'| `"{name}:4"` |' in page
    assert ({**policies.FIXED, **policies.COUNTED}[name]).__name__ in autoremat.policies.__all__
    assert f'"{name}' in policies.FORMS


@pytest.mark.parametrize("value", ["ful", "uniform", "uniform:0", "full:1", "block:-1", 3, Odd, "selective:atention"])
def test_anything_else_is_refused(value):
    with pytest.raises(OptionsError, match="is not accepted"):
        policies.parse(value)


def test_a_policy_is_told_from_every_other():
    everything = [policies.Full(), policies.Sqrt(), policies.Uniform(2), policies.Uniform(3), policies.Block(2), Odd()]
    identities = [str(policies.identity(policy)) for policy in everything]
    assert len(set(identities)) == len(everything)
    assert policies.identity(Odd()) == policies.identity(Odd())
    number = 3
    with pytest.raises(OptionsError, match="caches must tell it from others"):
        policies.parse(lambda forward: [Region(forward.layers[number])])


def test_the_policy_of_the_options_comes_from_three_places(monkeypatch):
    keys = {key_of(autoremat.Options(policy=p)) for p in (None, "full", "uniform:1", "uniform:2", "selective", "selective:mlp")}
    assert len(keys | {key_of(autoremat.Options(save=["a"]))}) == 7
    with pytest.raises(OptionsError, match="save='a' is not accepted. Accepted: a list of globs"):
        autoremat.Options(save="a")
    monkeypatch.setenv("AUTOREMAT_POLICY", "uniform:2")
    assert autoremat.Options.parse({}).policy == policies.Uniform(2)
    assert autoremat.Options.parse({"policy": None}).policy is None
    autoremat.configure(policy="selective:moe", save=["*.attn"])
    found = autoremat.Options.parse({})
    assert found == autoremat.Options(policy=policies.Selective(("moe",)), save=("*.attn",))
    monkeypatch.setenv("AUTOREMAT_POLICY", "ful")
    autoremat.configure()
    with pytest.raises(OptionsError, match="AUTOREMAT_POLICY='ful' is not accepted"):
        autoremat.Options.parse({})


def test_a_stored_plan_leaves_no_room_for_orders(tmp_path):
    path = tmp_path / "plan.json"
    autoremat.plan(autoremat.Graph.from_dag([1.0, 1.0], [4, 4], [(0, 1)], num_forward=1)).save(path)
    for orders in ({"policy": "full"}, {"save": ["a"]}, {"recompute": ["a"]}):
        with pytest.raises(OptionsError, match="cannot be given beside it"):
            autoremat.Options(plan=path, **orders)
