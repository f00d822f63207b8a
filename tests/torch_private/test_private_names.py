"""Private names of torch: each module imports on the torch that runs, and names that differ between versions are there."""

from __future__ import annotations

import importlib

import pytest
import torch.distributed.tensor  # noqa: F401  # imported here, because its first use warns of other packages
from layers import SOURCES

from autoremat.torch_private import names


@pytest.mark.parametrize("module", [module for module in SOURCES if module and module != "__main__"])
def test_every_module_imports_on_this_torch(module):
    importlib.import_module(f"autoremat.{module}")


@pytest.mark.parametrize("place", names.VERSIONS)
def test_a_name_is_there_in_its_versions_and_in_no_other(place, monkeypatch):
    is_expected = names.MINOR in names.VERSIONS[place]
    monkeypatch.setitem(names.VERSIONS, place, range(99))
    try:
        names.resolve(place)
        is_there = True
    except (AttributeError, ImportError):
        is_there = False
    assert is_there == is_expected
