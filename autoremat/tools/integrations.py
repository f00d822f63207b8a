"""Gives code that asks for Inductor this backend, and the Trainer of Hugging Face the budget of its card."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from autoremat.device_memory.budget import device_budget
from autoremat.options.options import configure
from autoremat.torch_private import hooks


@contextlib.contextmanager
def as_inductor() -> Iterator[None]:
    """Makes ``torch.compile`` use autoremat where code in this thread asks for Inductor, by name or by default, while active.

    Some libraries accept no other name of a backend, such as torchtitan for models with FlexAttention. autoremat generates code
    with Inductor, so what those libraries require of the backend still holds. The budget comes from ``autoremat.configure``.

    The calls of ``torch.compile`` and ``module.compile`` must lie inside. The compiled functions may run, and compile, later.
    """

    def with_this_backend(compile_: Callable[..., Any], *arguments: Any, backend: Any = "inductor", **settings: Any) -> Any:
        return compile_(*arguments, backend="autoremat" if backend == "inductor" else backend, **settings)

    with hooks.hooked(torch, "compile", with_this_backend):
        yield


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
