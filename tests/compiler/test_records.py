"""Records of compilations with numbers that are none count as absent."""

from __future__ import annotations

import json

import pytest

from autoremat.compiler import records


@pytest.mark.parametrize("number", [-(10**60), 10**60, 1.5, True, "1", None, [], float("nan"), float("inf")])
def test_a_record_with_an_implausible_headroom_counts_as_absent(number: object, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"report": None, "extra_headroom_bytes": 512, "agreement": ""}
    monkeypatch.setattr(records, "read_text", lambda *_: json.dumps(stored))
    assert records.load("key") == records.Record(None, 512)
    stored["extra_headroom_bytes"] = -512  # of a plan that is looser than the budget
    assert records.load("key") == records.Record(None, -512)
    stored["extra_headroom_bytes"] = number  # type: ignore[assignment]
    assert records.load("key") is None
