"""The examples of other libraries run, and the backend does its work in them. Uncompiled: their code is what is tested."""

from __future__ import annotations

import copy
import runpy
import warnings
from pathlib import Path

import pytest

import autoremat

FOLDER = Path(__file__).parent.parent / "examples" / "integrations"
NEEDS = {
    "plain_loop": [],
    "huggingface_trainer": ["accelerate"],
    "accelerate_loop": ["accelerate"],
    "lightning_module": ["lightning"],
    "peft_lora": ["peft"],
}


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> list[autoremat.Report]:
    """The reports of what the example compiled."""
    for package in ("transformers", *NEEDS[name]):
        pytest.importorskip(package, reason=f"needs {package}, of the extra `integrations`")
    monkeypatch.syspath_prepend(FOLDER)
    autoremat.configure(compiler="aot_eager", time_limit=60)
    count = len(autoremat.reports())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those libraries' own
        warnings.simplefilter("error", autoremat.BudgetWarning)
        warnings.simplefilter("error", autoremat.FallbackWarning)
        runpy.run_path(str(FOLDER / f"{name}.py"))
    return autoremat.reports()[count:]


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_the_example_runs_under_its_budget(name, monkeypatch, capsys):
    reports = run(name, monkeypatch)
    assert "recomputation" in capsys.readouterr().out
    largest = max(reports, key=lambda report: report.baseline_peak_bytes)
    assert largest.budget_bytes == int(largest.baseline_peak_bytes * 0.6)
    assert largest.predicted_peak_bytes <= largest.budget_bytes
    assert largest.recomputed_ops > 0


def test_every_example_is_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*NEEDS, "tiny_model"}


@pytest.fixture
def accelerates_own_names(monkeypatch):
    backends = pytest.importorskip("accelerate.utils", reason="needs accelerate, of the extra `integrations`").DynamoBackend
    monkeypatch.setattr(backends, "_missing_", backends._missing_)
    monkeypatch.setattr(backends, "_member_map_", dict(backends._member_map_))
    return backends


def test_accelerate_takes_our_name_and_no_others(accelerates_own_names):
    from accelerate.utils import TorchDynamoPlugin

    from autoremat.tools import integrations

    integrations.accept_in_accelerate()
    integrations.accept_in_accelerate()
    assert TorchDynamoPlugin(backend="autoremat").to_kwargs()["backend"] == "autoremat"
    assert copy.deepcopy(accelerates_own_names("AUTOREMAT")) == accelerates_own_names("AUTOREMAT")
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):
        TorchDynamoPlugin(backend="autorematic")
