"""Requests: what is asked of one graph, of each kind of budget and by what surrounds the graph."""

from dataclasses import replace

import pytest
import torch
from requests_of_options import around, profile, request_with
from torch import fx, nn

import autoremat
from autoremat import BudgetWarning, Options, OptionsError, OptionWarning
from autoremat.planner.multigraph.ledger import OpenCalls
from autoremat.request.budgets import request_of, requests_of
from autoremat.request.request import AS_A_STEP, RequestedLimits
from autoremat.request.surroundings import BLOCK
from autoremat.torch_private.hooks import held

MODULE = fx.symbolic_trace(nn.Identity())


@pytest.mark.parametrize(
    ("budget", "limits"),
    [
        (None, RequestedLimits()),
        (4096, RequestedLimits(4096)),
        ("4KiB", RequestedLimits(4096)),
        (0.7, RequestedLimits(reference_share=0.7)),
        ("auto", RequestedLimits(2**41 - 512 * 2**20)),
    ],
)
def test_each_kind_of_budget_has_its_limits(budget, limits):
    assert request_with(Options(memory_budget=budget)).limits == limits
    assert request_with(Options(memory_budget=budget, max_slowdown=0.5)).limits == replace(limits, max_slowdown=0.5)


def test_a_limit_that_is_no_peak_is_refused_where_a_step_shares_out_bytes():
    assert RequestedLimits(max_slowdown=0.1).is_bounded
    assert not RequestedLimits(host_bytes=5).is_bounded
    with pytest.raises(OptionsError, match="max_slowdown bounds one graph"):
        autoremat.profile_step(nn.Linear(2, 2), torch.ones(2, 2), options={"max_slowdown": 0.1})
    with pytest.raises(OptionsError, match="max_slowdown bounds one graph"):
        autoremat.compile_blocks([nn.Linear(2, 2)], "1MiB", options={"max_slowdown": 0.1})


def test_a_budget_decides_what_happens_to_a_graph_that_cannot_be_planned():
    assert request_with(Options()).falls_back
    assert not request_with(Options(memory_budget=1)).falls_back
    assert request_with(Options(memory_budget=1, on_planning_error="fallback")).falls_back


def test_a_graph_has_its_share_of_a_profiled_step_and_the_ledger_of_the_device():
    shared = profile()
    (request,) = requests_of(Options(memory_budget=shared), around()).values()
    assert request.limits.step_share == shared.shares[0]
    assert request.calls == OpenCalls()
    ledger = autoremat.device_budget("1GiB", nn.Linear(2, 2))
    options = Options(memory_budget=replace(shared, device_ledger=ledger))
    assert requests_of(options, around())[None].limits.ledger == ledger
    with pytest.warns(BudgetWarning, match="the profiled step did not have"):
        (unknown,) = requests_of(options, around("another")).values()
    assert (unknown.limits.peak_bytes, unknown.limits.ledger) == (4096, ledger)


def test_open_calls_have_no_effect_under_a_share_of_a_step_alone():
    with pytest.warns(OptionWarning, match="in_flight and accumulate have no effect"):
        (request,) = requests_of(Options(memory_budget=profile(), in_flight=3), around()).values()
    assert request.calls == OpenCalls()
    (unbounded,) = requests_of(Options(memory_budget=profile(None), in_flight=3), around()).values()
    assert (unbounded.limits, unbounded.calls.number) == (RequestedLimits(), 3)


def test_blocks_with_one_share_have_one_request():
    with held(BLOCK, 1):
        requests = requests_of(Options(memory_budget=profile(8192, (0, 1))), around())
    assert set(requests) == {0, 1}
    assert requests[0] is requests[1]
    assert "those of one block" in requests[0].limits.advice[0]


def test_a_part_of_a_broken_function_takes_its_minimum_peak_under_a_share_alone():
    broken = around(module=MODULE)
    vars(broken)["why_broken"] = "a call of print. More words"
    share, in_bytes = (request_of(Options(memory_budget=budget), broken) for budget in (0.5, 4096))
    assert (share.on_infeasible, share.must_fit) == (AS_A_STEP, False)
    assert (in_bytes.on_infeasible, in_bytes.must_fit) == ("raise", True)
    assert "broke the function (a call of print)" in share.limits.advice[0]


def test_pareto_ignores_the_budget_of_all(isolated_options):
    autoremat.configure(memory_budget="auto", compiler="aot_eager", cost_model="roofline")
    points = autoremat.pareto(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.ones(4, 8), points=2)
    assert len(points) > 1
