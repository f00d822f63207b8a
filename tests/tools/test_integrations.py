"""The examples of other libraries run, and the backend does its work in them, as does the trainer's callback; uncompiled."""

import copy
import importlib
import os
import re
import runpy
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from folders import ROOT
from measured_optimizers import Model, row
from torch import Tensor, nn
from trained_steps import EAGER, compiled

import autoremat
from autoremat.tools import integrations

FOLDER = ROOT / "examples" / "integrations"
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
    assert "; time +" in capsys.readouterr().out
    largest = max(reports, key=lambda report: report.baseline_peak_bytes)
    assert largest.budget_bytes == int(largest.reference_bytes * 0.6)
    assert largest.predicted_peak_bytes <= largest.budget_bytes
    assert largest.recomputed_ops > 0


def test_every_example_is_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*NEEDS, "tiny_model"}


def test_accelerate_takes_our_names_and_no_others():
    accelerate = pytest.importorskip("accelerate.utils", reason="needs accelerate, of the extra `integrations`")
    plugin = accelerate.TorchDynamoPlugin
    assert plugin(backend="autoremat").to_kwargs() == {"backend": "autoremat"}
    assert plugin(backend="autoremat:6GiB").to_kwargs() == {"backend": "autoremat:6gib"}
    assert copy.deepcopy(accelerate.DynamoBackend("AUTOREMAT")) == accelerate.DynamoBackend("AUTOREMAT")
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):
        plugin(backend="autorematic")


def test_a_name_with_a_budget_is_a_backend_of_torch():
    accelerate = pytest.importorskip("accelerate.utils", reason="needs accelerate, of the extra `integrations`")
    autoremat.configure(compiler="aot_eager", cost_model="roofline")
    settings = accelerate.TorchDynamoPlugin(backend="autoremat:1MiB").to_kwargs()
    torch.compile(Layer(), **settings)(torch.randn(4, 8)).sum().backward()
    assert autoremat.reports()[-1].budget_bytes == 2**20


@pytest.mark.slow
def test_the_entry_point_makes_the_trainers_arguments_work_without_an_import(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra `integrations`")
    pytest.importorskip("accelerate", reason="needs the extra `integrations`")
    installed = tmp_path / "autoremat_as_installed-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: autoremat-as-installed\nVersion: 0\n")
    project = (ROOT / "pyproject.toml").read_text()
    (call,) = re.findall(r'"torch\.backends"\].*\nautoremat = "(.*)"', project)
    (installed / "entry_points.txt").write_text(f"[torch.backends]\nautoremat = {call}\n")
    program = (
        "from transformers import TrainingArguments\n"
        "TrainingArguments(output_dir='out', torch_compile_backend='autoremat:0.6', use_cpu=True)\n"
        "from accelerate.utils import TorchDynamoPlugin\n"
        "print(TorchDynamoPlugin(backend='autoremat:0.6').to_kwargs())\n"
    )
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert "autoremat:0.6" in done.stdout, done.stderr


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def compile_layers(model: nn.Sequential, backend: str = "inductor") -> None:
    """Compiles each layer as torchtitan does with models that contain FlexAttention."""
    if backend not in {"inductor", "aot_eager"}:
        raise ValueError(f"compile backend {backend!r} is neither 'inductor' nor 'aot_eager'")
    for layer in model:
        layer.compile(backend=backend, fullgraph=True)


def test_a_caller_that_accepts_inductor_alone_compiles_with_autoremat():
    autoremat.configure(compiler="aot_eager", cost_model="roofline", memory_budget="1MiB")
    original, count = torch.compile, len(autoremat.reports())
    model = nn.Sequential(Layer())
    with integrations.as_inductor():
        compile_layers(model)
    model(torch.randn(4, 8)).sum().backward()
    assert torch.compile is original
    assert len(autoremat.reports()) > count
    with pytest.raises(ValueError, match="neither 'inductor' nor"):
        compile_layers(model, "autoremat")


def test_only_requests_for_inductor_in_this_thread_change():
    seen: list[str] = []

    def backend(module, inputs):
        seen.append("own backend")
        return module.forward

    def request():
        torch.compile(torch.sin, options={"memory_budget": "1GiB"})

    with integrations.as_inductor(), ThreadPoolExecutor(1) as pool:
        torch.compile(nn.Linear(2, 2), backend=backend)(torch.randn(1, 2))
        with pytest.raises(RuntimeError, match="Unexpected optimization option memory_budget"):
            pool.submit(request).result()
        request()
    assert seen == ["own backend"]


@pytest.mark.parametrize(
    ("library", "module", "name"),
    [
        ("accelerate", "accelerate.utils.memory", "should_reduce_batch_size"),
        ("lightning", "lightning.pytorch.utilities.memory", "is_oom_error"),
    ],
)
def test_a_search_for_the_batch_size_goes_on_after_an_infeasible_budget(library, module, name):
    """The Trainer's ``auto_find_batch_size`` asks accelerate. Composer looks for the last words alone."""
    pytest.importorskip(library, reason=f"needs {library}, of the extra `integrations`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        is_memory = getattr(importlib.import_module(module), name)
    step = compiled(lambda x: (x.sin() * x.cos()).sum(), memory_budget=1000)
    with pytest.raises(RuntimeError, match=r"CUDA out of memory\.") as caught:
        step(torch.ones(64, 64, requires_grad=True))
    assert is_memory(caught.value)
    step(torch.ones(4, 4, requires_grad=True)).backward()  # a smaller batch fits
    assert not is_memory(RuntimeError("another error"))


@pytest.mark.slow
def test_a_callback_of_the_trainer_needs_the_memory_alone(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs the extra `integrations`")
    pytest.importorskip("accelerate", reason="needs the extra `integrations`")
    from autoremat.tools.integrations import device_budget_callback

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()
            self.inner.compile(backend="autoremat", options=EAGER)

        def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.inner(tokens)}

    callback = device_budget_callback("6MiB", device="cpu")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=2, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    data = [{"tokens": torch.randint(64, (32,))} for _ in range(32)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        warnings.simplefilter("error", autoremat.BudgetWarning)
        transformers.Trainer(model=Wrapped(), args=arguments, train_dataset=data, callbacks=[callback]).train()
    report = autoremat.reports()[-1]
    assert report.device_ledger.accumulate == 2
    assert report.budget_bytes == report.device_ledger.budget_bytes
    assert row(report.device_ledger, "optimizer state after the first step").bytes > 0
