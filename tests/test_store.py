"""Records on disk: what is saved is loaded, and nothing broken on disk is an error."""

from __future__ import annotations

import json
from pathlib import Path

import platformdirs
import pytest
from test_report import report_for

from autoremat import store
from autoremat.store import Record


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reports"


def test_a_record_comes_back_as_it_was(folder):
    record = Record(report_for(16 << 20, compiled_peak_bytes=5, replans=1), margin_bytes=77)
    store.save("key", record)
    assert store.load("key") == record
    assert [path.name for path in folder.iterdir()] == ["key.json"]


def test_a_record_of_a_graph_without_backward_comes_back(folder):
    store.save("inference", Record(None))
    assert store.load("inference") == Record(None, 0)


def test_an_unknown_key_has_no_record(folder):
    assert store.load("nothing") is None
    store.save("key", Record(None))
    assert store.load("nothing") is None


def test_saving_again_replaces(folder):
    store.save("key", Record(None, 1))
    store.save("key", Record(None, 2))
    assert store.load("key") == Record(None, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "\x00\xff",
        "[]",
        "null",
        "7",
        "{}",
        '{"report": null}',
        '{"report": {}, "margin_bytes": 0}',
        '{"report": [1], "margin_bytes": 0}',
        '{"report": null, "margin_bytes": "many"}',
        '{"report": null, "margin_bytes": null}',
    ],
)
def test_a_broken_record_is_as_good_as_none(folder, text):
    folder.mkdir(parents=True)
    (folder / "key.json").write_bytes(text.encode("latin-1"))
    assert store.load("key") is None


def test_a_record_of_another_version_is_as_good_as_none(folder):
    store.save("key", Record(report_for(None)))
    path = folder / "key.json"
    fields = json.loads(path.read_text())
    fields["report"]["a_new_figure"] = 1
    path.write_text(json.dumps(fields))
    assert store.load("key") is None


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path / "file"))
    store.save("key", Record(None))
    assert store.load("key") is None


def test_an_interrupted_write_leaves_the_old_record(folder, monkeypatch):
    store.save("key", Record(None, 1))

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    store.save("key", Record(None, 2))
    assert store.load("key") == Record(None, 1)


def test_the_default_folder_is_the_users_cache(monkeypatch):
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("AUTOREMAT_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("AUTOREMAT_CACHE_DIR", value)
        assert store.folder() == platformdirs.user_cache_path("autoremat") / "reports"
