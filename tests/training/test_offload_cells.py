"""Small models with dropout: gradients, both peaks and the bytes that are moved, for forms and budgets.

`benchmarks/offload_runs.py` runs all cells, also under Inductor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import stays
from offload_cells import BUDGETS, MODELS, STORES, Cells


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with stays.small_device():
        yield


@functools.cache
def cells(model: str) -> Cells:
    return Cells(model, "aot_eager")


@pytest.mark.parametrize("model", MODELS)
def test_all_forms_at_the_least_budget(model):
    found = cells(model).cell("both", "least")
    assert found.holds, found
    assert found.host_bytes


@pytest.mark.slow
@pytest.mark.parametrize("store", ["host", "bits"])
@pytest.mark.parametrize("model", MODELS)
def test_single_forms_at_several_budgets(model, store):
    number = list(MODELS).index(model)
    found = cells(model).cell(store, BUDGETS[number % len(BUDGETS)])
    assert found.holds, found
    assert set(STORES[store]) >= {"device", store}


@pytest.mark.slow
def test_generated_code_keeps_its_budgets_too():
    found = Cells("gated", "inductor").cell("both", "middle")
    assert found.holds, found
