"""The command line: what it prints, and the exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result
from folders import ROOT
from reports import SIZE, report_for

from autoremat import __version__, cli
from autoremat.basics import disk_cache
from autoremat.basics.errors import BudgetInfeasible, OptionsError
from autoremat.planner.plans.plan import Plan
from autoremat.report.report import Report


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(one) for one in arguments])


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text(report_for(16 * SIZE).to_json())
    return path


def test_a_stored_report_is_shown(stored):
    done = run("report", stored)
    assert done.exit_code == 0, done.output
    assert done.stdout.rstrip() == str(Report.from_json(stored.read_text())).rstrip()
    assert json.loads(run("report", stored, "--json").stdout) == json.loads(stored.read_text())


def test_what_is_no_report_is_wrong_usage(tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}')
    for path in (tmp_path / "other.json", tmp_path / "nothing.json", tmp_path):
        done = run("report", path)
        assert done.exit_code == 2
        assert str(path) in done.stderr
        assert "Traceback" not in done.stderr


def test_help_and_version():
    assert "Exit codes" in run("--help").output
    assert __version__ in run("--version").output


INFEASIBLE = BudgetInfeasible(budget_bytes=1, minimum_bytes=2, lower_bound_bytes=1)


class Wrapped(Exception):
    """As torch wraps what a backend raises."""

    inner_exception = INFEASIBLE


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (INFEASIBLE, 1, "no plan was found"),
        (Wrapped("compilation failed"), 1, "no plan was found"),
        (OptionsError("no such option"), 2, "Error: no such option"),
        (KeyError("lost"), 3, "KeyError: 'lost'"),
    ],
)
def test_each_error_has_a_message_and_a_code(monkeypatch, error, code, text):
    @click.command()
    def fail() -> None:
        raise error

    monkeypatch.setitem(cli.main.commands, "fail", fail)
    done = run("fail")
    assert done.exit_code == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert run("--traceback", "fail").exception is error


TRAINING = """
import torch
from torch import nn

def net(batch=256):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)))
    return nn.Sequential(model, nn.Linear(32, 1), nn.Flatten(0)), torch.randn(batch, 32)

def loss():
    model, x = net()
    return lambda x: model(x).square().mean(), (x,)

def by_keyword():
    model, x = net()
    return lambda x: model(x).square().mean(), {"x": x}

def sized(batch):
    return net(batch)

def mistaken():
    return lambda x: lost(x), torch.randn(3)

def stepped():
    model, x = net()
    return lambda x: model(x).square().mean(), (x,), torch.optim.SGD(model.parameters(), lr=0.1)

def wrong():
    return 7

def failing():
    raise ValueError("no data here")

number = 7
"""


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the present folder."""
    (tmp_path / "my_training.py").write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_training", raising=False)
    return "my_training"


@pytest.mark.parametrize("function", ["net", "loss", "by_keyword"])
def test_explain_prints_the_report_and_stores_the_plan(training, function, tmp_path):
    done = run("explain", f"{training}:{function}", "--budget", "0.7", "-o", "compiler=aot_eager", "--save-plan", "plan.json",
               "--values", "--details", "--totals", "op", "--peak", "--html", "report.html")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "aten.addmm" in done.stdout
    assert "<html" in (tmp_path / "report.html").read_text()
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.budget_bytes is not None
    assert plan.peak_bytes <= plan.budget_bytes


@pytest.mark.filterwarnings("ignore:host_memory has no effect")
def test_explain_for_a_device_that_is_not_here_as_json(training):
    limits = ("--budget", "1GiB", "--host-memory", "64GiB")
    done = run("explain", f"{training}:loss", "--device", "H100-80GB", "--json", *limits)
    assert done.exit_code == 0, done.output
    report = Report.from_json(done.stdout)
    assert (report.budget_bytes, report.host_memory_bytes) == (2**30, 64 * 2**30)
    assert "H100" in report.device


def test_explain_counts_a_whole_device(training):
    arguments = ("explain", f"{training}:loss", "--device-memory", "H100-80GB", "--accumulate", 4, "-o", "compiler=aot_eager")
    done = run(*arguments, "--optimizer", "AdamW", "--json")
    assert done.exit_code == 0, done.output
    report = Report.from_json(done.stdout)
    assert "H100" in report.device
    assert report.device_ledger.accumulate == 4
    assert "optimizer state after the first step" in {row.name for row in report.device_ledger.rows}
    returned = Report.from_json(run(*(str(one).replace(":loss", ":stepped") for one in arguments), "--json").stdout)
    assert returned.device_ledger.rows != report.device_ledger.rows
    assert "ledger of the device" in run(*arguments, "--details").stdout


def test_the_device_of_a_command_is_that_of_its_ledger(training):
    arguments = ("explain", f"{training}:loss", "--device-memory", "24GiB", "-o", "compiler=aot_eager", "--json")
    named = Report.from_json(run(*arguments, "--device", "RTX 4090").stdout).device_ledger
    assert "4090" in named.device
    assert named.reserve_bytes >= 2**28
    assert next(row for row in named.rows if row.name == "context and libraries").bytes >= 2**28
    assert Report.from_json(run(*arguments).stdout).device_ledger.device == "cpu"


@pytest.mark.slow
def test_batch_finds_the_largest_size(training):
    arguments = ("batch", f"{training}:net", "--step", 64, "-o", "compiler=aot_eager", "--budget")
    done = run(*arguments, "256KiB", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["size"] % 64 == 0
    assert found["next_size"] == found["size"] + 64
    assert found["report"]["predicted_peak_bytes"] <= 2**18
    assert run(*arguments, "1KiB").exit_code == 1
    limited = run(*arguments, "256KiB", "--limit", found["size"]).stdout.split()
    assert f"size that fits {found['size']} budget 256.00 KiB" in " ".join(limited)
    assert "no larger one is allowed" in " ".join(limited)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["{}:loss", "--budget", "1KiB"], 1, "no plan was found"),
        (["{}:loss", "--budget", "much"], 2, "memory_budget='much'"), (["{}:loss", "-o", "color"], 2, "KEY=VALUE"),
        (["{}:loss", "--device-memory", "1KiB", "--optimizer", "SGD"], 1, "too small"),
        (["{}:loss", "--device-memory", "1GiB", "--budget", "1GiB"], 2, "exclude each other"),
        (["{}:loss", "--optimizer", "SGD"], 2, "--device-memory"), (["{}"], 2, "MODULE:FUNCTION"),
        (["{}:number"], 2, "is no function"), (["{}:wrong"], 2, "returns int"), (["nowhere:loss"], 2, "'nowhere'"),
        (["{}:sized"], 2, "'batch'"), (["{}:loss", "--save-plan", "no/folder/plan.json"], 2, "'no/folder'"),
        (["{}:mistaken"], 2, "name 'lost' is not defined"), (["{}:failing"], 3, "ValueError: no data here"),
    ],
)  # fmt: skip
def test_what_goes_wrong_has_a_message_and_a_code(training, arguments, code, text):
    done = run("explain", *(one.format(training) for one in arguments))
    assert done.exit_code == code, done.output
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_the_module_is_the_command_and_needs_no_torch(stored):
    code = (
        f"import sys; sys.argv = ['autoremat', 'report', {str(stored)!r}]\n"
        "import runpy\ntry: runpy.run_module('autoremat', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "least possible" in done.stdout


def test_the_cache_is_shown_and_cleared(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AUTOREMAT_CACHE_SIZE", "2MiB")
    for number in range(3):
        disk_cache.write_text("reports", f"key{number}", "x" * 1024)
    disk_cache.write_text("rates", "device", "x" * 512)
    table = [line.split() for line in run("cache").stdout.splitlines()[1:]]
    assert ["reports", "3", "files", "3.00", "KiB"] in table
    assert ["rates", "1", "files", "512", "B"] in table
    assert "3.50 KiB" in run("cache", "clear").stdout
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_the_doctor_names_versions_and_what_is_missing(monkeypatch):
    done = run("doctor")
    assert done.exit_code == 0, done.output
    for word in (torch.__version__, "2.11 to 2.15 are supported", "CUDA card", "cache"):
        assert word in done.stdout
    monkeypatch.setattr("autoremat.torch_private.compilers.cpp_compiler", lambda: "")
    done = run("doctor")
    assert done.exit_code == 2
    assert "NO C++ compiler" in done.stdout
