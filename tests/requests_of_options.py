"""Requests of options without a graph, for tests of options."""

from __future__ import annotations

import torch

from autoremat.options.options import Options
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
