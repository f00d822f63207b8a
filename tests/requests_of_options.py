"""Requests of options without a graph, for tests of options."""

import torch
from torch import fx

from autoremat.options.options import Options
from autoremat.planner.multigraph.ledger import Moment
from autoremat.planner.multigraph.step import Step, StepGraph
from autoremat.planner.multigraph.step_profile import StepProfile, share_out
from autoremat.planner.plans.limits import PlanPoint
from autoremat.request.budgets import request_of
from autoremat.request.request import Request
from autoremat.request.surroundings import Surroundings

CPU = torch.device("cpu")


def request_with(options: Options, free: int | None = 2**41) -> Request:
    """Returns the request of a graph on a device with ``free`` bytes."""
    return request_of(options, Surroundings(CPU, free_bytes_of=lambda device: free, runs_here=False))


def budget_with(options: Options, reference_bytes: int, free: int | None = 2**41) -> int | None:
    """Returns the budget in bytes of a graph with that reference peak."""
    return request_with(options, free).limits.bytes_for(reference_bytes)


def key_of(options: Options) -> str:
    """Returns the cache key of the options' request."""
    return request_with(options).cache_key()


def profile(budget: int | None = 4096, blocks: tuple[int | None, ...] = (None,)) -> StepProfile:
    """A step of one graph with two plans, called once by each block."""
    front = (PlanPoint(0.0, 1024, 1024, 2048), PlanPoint(1.0, 256, 1024, 2048))
    graphs = tuple(StepGraph("key", "model.py:1", 1, front, front[0], 10.0, block=block) for block in blocks)
    moments = tuple(Moment(0, (), number, half) for number in range(len(blocks)) for half in (False, True))
    return share_out(Step(graphs, moments, ("forward 0", "backward 0"), "cpu"), budget)


def around(key: str = "key", module: fx.GraphModule | None = None) -> Surroundings:
    found = Surroundings(CPU, module)
    vars(found)["key"] = key
    return found
