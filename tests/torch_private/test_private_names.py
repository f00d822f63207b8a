"""Private names and versions of torch: modules import, names are there in their versions, and other versions are refused."""

from __future__ import annotations

import importlib

import pytest
import torch.distributed.tensor  # noqa: F401  # imported here, because its first use warns of other packages
from layers import SOURCES

from autoremat.basics.environment import NEWER_TORCH
from autoremat.basics.errors import SUPPORTED_MINORS, UnsupportedTorchError
from autoremat.torch_private import check_torch_version, names


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


OLDER, NEWER = f"2.{SUPPORTED_MINORS[0] - 1}.1", f"2.{SUPPORTED_MINORS.stop}.0.dev20990101+cpu"


@pytest.mark.parametrize("version", [f"2.{minor}.0" for minor in SUPPORTED_MINORS])
def test_supported_versions(version):
    check_torch_version(version)


@pytest.mark.parametrize("version", [OLDER, NEWER, "1.13.1", "3.12.0", "main"])
def test_other_versions_are_refused(version):
    with pytest.raises(UnsupportedTorchError, match=version.split("+")[0]):
        check_torch_version(version)


def test_later_versions_come_in_on_request_and_earlier_ones_never_do(monkeypatch):
    monkeypatch.setenv(NEWER_TORCH, "1")
    check_torch_version(NEWER)
    with pytest.raises(UnsupportedTorchError):
        check_torch_version(OLDER)
    monkeypatch.setenv(NEWER_TORCH, "0")
    with pytest.raises(UnsupportedTorchError):
        check_torch_version(NEWER)
