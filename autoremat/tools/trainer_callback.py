"""A callback for Hugging Face's Trainer that sets the budget from the card's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoremat.device_memory.budget import device_budget
from autoremat.options.options import configure


def device_budget_callback(total: int | str = "auto", others: Mapping[str, Any] | None = None, **keywords: Any) -> Any:
    """Returns a ``TrainerCallback`` that gives all graphs of a training the budget of a whole device.

    When the training begins, it calls ``autoremat.device_budget`` with the Trainer's model, optimizer and number of accumulated
    batches, and passes the result to ``autoremat.configure``. Graphs that are compiled before that keep their budgets. The
    callback's attribute ``budget`` has the result.

    ``total``, ``others`` and the ``keywords`` are those of ``autoremat.device_budget``.

    Raises ``ImportError`` if transformers is not installed.
    """
    from transformers import TrainerCallback

    class DeviceBudgetCallback(TrainerCallback):
        """Sets the memory budget of the process from the memory of its device."""

        budget = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            """Predicts the memory of the training and sets the budget."""
            steps = {"accumulate": args.gradient_accumulation_steps, **keywords}
            self.budget = device_budget(total, given["model"], given["optimizer"], others=others, **steps)
            configure(memory_budget=self.budget)

    return DeviceBudgetCallback()
