"""Versions of torch that the package refuses, and those that it lets in on request."""

from __future__ import annotations

import pytest

from autoremat.basics.environment import NEWER_TORCH
from autoremat.basics.errors import SUPPORTED_MINORS, UnsupportedTorchError
from autoremat.torch_private import check_torch_version

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
