"""Shared by the benchmarks of peaks: models by kind, and Inductor's code for a plan, with its kernels or without.

Memory is the same on a busy machine as on an idle one, and the peak of generated code is known without its kernels.
"""

from __future__ import annotations

import contextlib
import sys
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import model_zoo
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from harness import ROOT
from torch import fx, nn
from torch._inductor.compile_fx import compile_fx

import autoremat
from autoremat.compiler import compile_loop
from autoremat.compiler.lowering import Halves, Partitioning, code_peaks
from autoremat.compiler.planned_graph import PlannedGraph
from autoremat.compiler.problem import Problem

sys.path.append(str(ROOT / "tests"))
import models as test_models  # noqa: E402
from emulated_cuda.steps import replayed_peaks as replayed_peaks  # noqa: E402

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


def batched(built: Built, times: int) -> Built:
    """Returns the model with its batch repeated, so that activations outweigh bytes of rounding."""
    model, inputs = built
    return model, tuple(tensor.repeat(times, *[1] * (tensor.dim() - 1)) for tensor in inputs)


def with_dropout(built: Built, probability: float = 0.1) -> Built:
    model, inputs = built
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
    return model, inputs


def unet() -> Built:
    """Returns a U-Net with two levels down and up."""
    return model_zoo.UNet((8, 16)), model_zoo.images(64)


def densenet() -> Built:
    """Returns one dense block of four layers."""
    convolve, block, pool = model_zoo.convolve(3, 16), model_zoo.DenseBlock(16, 8, 4), nn.Conv2d(48, 24, 1)
    return model_zoo.Classifier(nn.Sequential(convolve, block, pool), 24), model_zoo.images(32)


def lstm() -> Built:
    """Returns an LSTM cell unrolled over six steps."""
    model, (tokens,) = test_models.lstm()
    return model, (tokens[:, :6].repeat(4, 1),)


KINDS: dict[str, Callable[[], Built]] = {
    "llama": lambda: batched(model_zoo.llama(2), 4),
    "gpt2": lambda: batched(model_zoo.gpt2(2), 4),
    "bert": lambda: with_dropout(batched(model_zoo.bert(2), 4)),
    "t5": lambda: batched(model_zoo.t5(1), 4),
    "vit": lambda: model_zoo.vit(2),
    "resnet": lambda: model_zoo.resnet("basic", [1, 1, 1, 1]),
    "unet": unet,
    "densenet": densenet,
    "lstm": lstm,
}
"""Nine kinds of models with as few layers as show all that the kind does, so that they compile in seconds."""

PATIENT = {"time_limit": 600, "on_planning_error": "raise"}
"""Options: a busy machine must not cut the planner's search short, and nothing is left to Inductor alone."""

BUILDERS = {**model_zoo.MODELS, "llama-24": lambda: model_zoo.llama(24), **KINDS}


class Device:
    """Where :func:`build` puts models and inputs."""

    chosen = torch.device("cpu")


class Lowered(BaseException):
    """Ends a compilation whose code is generated, before a kernel is compiled. No stage takes it for a failure."""


@dataclass(frozen=True)
class Attempt:
    """One plan that code was generated for. Bytes are peaks above the start of the step."""

    planned_bytes: int
    """The simulated peak with code headroom."""
    code_bytes: int
    """Of the halves that were generated: an attempt ends with the first that is over the budget."""


@dataclass
class Watch:
    """The attempts of one compilation, and its last plan."""

    attempts: list[Attempt] = field(default_factory=list)
    planned: PlannedGraph | None = None

    @property
    def report(self) -> autoremat.Report:
        """Of the last attempt. Raises ``RuntimeError`` if nothing was planned."""
        if self.planned is None:
            raise RuntimeError("nothing was planned: a cache answered, or the graph has no backward")
        return self.planned.report


def build(name: str) -> Built:
    """Returns the model in training mode and its inputs on the chosen device, always with the same weights and batch."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs = BUILDERS[name]()
    return model.train().to(Device.chosen), tuple(tensor.to(Device.chosen) for tensor in inputs)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Lowers every graph of the body again, so that its code is seen. Compiled kernels come from Inductor's cache."""
    with (
        functorch_config.patch({"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}),
        inductor_config.patch({"fx_graph_cache": False}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", autoremat.BudgetWarning)
        yield


@contextlib.contextmanager
def watching(kernels: bool) -> Iterator[Watch]:
    """Records every attempt of the compilations in the body.

    Without ``kernels``, each ends with ``Lowered`` once its last code is generated.
    """
    watch = Watch()
    lower = compile_loop.lower

    def watched(problem: Problem, partitioning: Partitioning, identity: Any, decide: Callable[[Halves], Any]) -> Any:
        found: dict[bool, int] = {}

        def decide_or_stop(halves: Halves) -> Any:
            found.update(code_peaks(halves))
            verdict = decide(halves)
            if verdict is None and not kernels and len(halves) == 2:
                raise Lowered
            return verdict

        try:
            return lower(problem, partitioning, identity, decide_or_stop)
        finally:
            watch.planned = partitioning.planned
            if watch.planned is not None:
                report = watch.planned.report
                planned = report.predicted_peak_bytes + report.code_headroom_bytes
                watch.attempts.append(Attempt(planned, max(found.values(), default=0)))

    with unittest.mock.patch.object(compile_loop, "lower", watched):
        yield watch


def inductor_alone() -> Callable[[fx.GraphModule, Any], Any]:
    """Returns plain Inductor as a backend of its own, for which Dynamo takes no code that it has compiled earlier."""
    return lambda module, inputs: compile_fx(module, inputs)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Swallows the ``Lowered`` that ends the compilation inside."""
    with contextlib.suppress(Lowered):
        yield


def planned(name: str) -> autoremat.Report:
    """Returns the report of the plan for a model without a budget. Nothing is lowered."""
    model, inputs = build(name)
    watch, plan_graph = Watch(), compile_loop.plan_graph

    def plan_and_stop(*given: Any, **headroom: int) -> Any:
        watch.planned = plan_graph(*given, **headroom)
        raise Lowered

    with uncached(), unittest.mock.patch.object(compile_loop, "plan_graph", plan_and_stop), without_kernels():
        torch.compile(model, backend="autoremat", options=PATIENT)(*inputs)
    return watch.report


def lowered(name: str, **options: Any) -> Watch:
    """Returns the attempts of compiling a model, without kernels."""
    model, inputs = build(name)
    with uncached(), watching(kernels=False) as watch, without_kernels():
        torch.compile(model, backend="autoremat", options=PATIENT | options)(*inputs)
    return watch
