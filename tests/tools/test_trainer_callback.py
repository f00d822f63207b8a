"""The callback that gives a trainer of transformers the budget of a whole device."""

from __future__ import annotations

import warnings

import pytest
import torch
from measured_optimizers import Model, row
from torch import nn

import autoremat

UNCOMPILED = {"compiler": "aot_eager", "cost_model": "roofline"}


@pytest.mark.slow
def test_a_callback_of_the_trainer_needs_the_memory_alone(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs the extra `integrations`")
    pytest.importorskip("accelerate", reason="needs the extra `integrations`")
    from autoremat.tools.trainer_callback import device_budget_callback

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()
            self.inner.compile(backend="autoremat", options=UNCOMPILED)

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
