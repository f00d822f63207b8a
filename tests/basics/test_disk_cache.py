"""Records on disk, and JSON data as values: what is saved is loaded, and nothing broken on disk is an error."""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from reports import report_for

from autoremat.basics import disk_cache
from autoremat.basics.errors import OptionsError
from autoremat.compiler import problem as records
from autoremat.compiler.problem import Record


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_said", set())
    return tmp_path / "cache" / "reports"


def test_a_record_comes_back_as_it_was(folder):
    record = Record(report_for(16 << 20, compiled_peak_bytes=5, replans=1), extra_headroom_bytes=77)
    records.save_record("key", Record(None, 1))
    records.save_record("key", record)
    assert records.load_record("key") == record
    assert records.load_record("nothing") is None
    assert [path.name for path in folder.iterdir()] == ["key.json"]


@pytest.mark.parametrize(
    "text",
    [
        "\x00\xff",
        "[]",
        '{"report": {}, "extra_headroom_bytes": 0}',
        '{"report": null, "extra_headroom_bytes": 1e400}',
        '{"report": null, "extra_headroom_bytes": 1.5}',
        '{"report": null, "extra_headroom_bytes": "1"}',
        "[" * 200_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_broken_record_is_as_good_as_none(folder, text):
    folder.mkdir(parents=True)
    (folder / "key.json").write_bytes(text.encode("latin-1"))
    assert records.load_record("key") is None


def test_a_folder_that_cannot_be_made_is_said_once_and_is_no_error(folder, monkeypatch, caplog):
    folder.parent.write_text("in the way")
    for _ in range(3):
        records.save_record("key", Record(None))
        assert records.load_record("key") is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(folder.parent) in record.getMessage()
    assert "Not a directory" in record.getMessage() or "File exists" in record.getMessage()


def test_an_interrupted_write_leaves_the_old_record_and_nothing_else(folder, monkeypatch, caplog):
    records.save_record("key", Record(None, 1))

    def full(*_: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(disk_cache.os, "replace", full)
    records.save_record("key", Record(None, 2))
    monkeypatch.undo()
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(folder.parent))
    assert records.load_record("key") == Record(None, 1)
    assert [path.name for path in folder.iterdir()] == ["key.json"]
    assert "no space left on device" in caplog.text


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_of_ours_is_said_once_and_as_good_as_none(folder, make, caplog):
    folder.mkdir(parents=True)
    make(folder / "key.json")
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        assert records.load_record("key") is None
    (record,) = caplog.records
    assert "key.json: it " in record.getMessage()
    assert descriptors in (0, len(os.listdir("/proc/self/fd")))


def test_what_was_not_used_for_longest_goes(folder, monkeypatch):
    monkeypatch.setenv("AUTOREMAT_CACHE_SIZE", "1MB")
    for number in range(9):
        disk_cache.write_text("reports", str(number), "x" * 100_000)
        os.utime(folder / f"{number}.json", (number, number))
    disk_cache.write_text("rates", "kept", "x" * 900_000)
    assert disk_cache.read_text("reports", "0") is not None  # used: no longer the oldest
    disk_cache.write_text("reports", "large", "x" * 200_000)
    assert sorted(path.stem for path in folder.iterdir()) == ["0", "3", "4", "5", "6", "7", "8", "large"]
    assert (folder.parent / "rates" / "kept.json").exists()


def test_what_a_killed_process_left_goes_after_a_while(folder):
    folder.mkdir(parents=True)
    for name, age in (("old", 2 * disk_cache.LEFT_OVER), ("young", 10.0)):
        (folder / f"{name}.tmp").write_text("x")
        os.utime(folder / f"{name}.tmp", (time.time() - age,) * 2)
    records.save_record("key", Record(None))
    assert sorted(path.name for path in folder.iterdir()) == ["key.json", "young.tmp"]


def test_a_size_that_is_none_is_refused(folder, monkeypatch):
    monkeypatch.setenv("AUTOREMAT_CACHE_SIZE", "much")
    with pytest.raises(OptionsError, match="AUTOREMAT_CACHE_SIZE: 'much' is not a number of bytes"):
        records.save_record("key", Record(None))


def test_clearing_leaves_what_is_not_ours(folder):
    records.save_record("key", Record(report_for(16 << 20)))
    disk_cache.write_text("rates", "device", "{}")
    (folder / "notes.txt").write_text("mine")
    assert disk_cache.clear() > 0
    assert [path.name for path in folder.parent.rglob("*") if path.is_file()] == ["notes.txt"]


def test_a_lock_is_held_by_one_thread_at_a_time(folder):
    inside, most = [], []

    def work(_: int) -> None:
        with disk_cache.locked("rates", "key", 60) as held:
            assert held
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert most == [1, 1, 1, 1]


def test_nobody_waits_for_a_lock_longer_than_told(folder):
    with disk_cache.locked("rates", "key", 0) as first, disk_cache.locked("rates", "key", 0.1) as second:
        assert (first, second) == (True, False)
