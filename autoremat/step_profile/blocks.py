"""``autoremat.compile_blocks``: compiles equal blocks one by one, with a few plans for one budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from autoremat.basics.checks import options_of
from autoremat.basics.display import PlainTable, Shown, named_figures
from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, OptionsError, StepProfileError, find_cause
from autoremat.basics.progress import now, status_if_slow
from autoremat.basics.warn import warn_user
from autoremat.capture.source_info import graph_key
from autoremat.compiler.dynamo_backend import backend
from autoremat.compiler.peers import agreed_profile
from autoremat.options.options import Options
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.step_profile import StepProfile, share_out
from autoremat.request.budgets import is_profile, refuse_open_calls, request_of
from autoremat.request.surroundings import BLOCK, RECEIVER, Surroundings
from autoremat.step_profile.profile import recorded_step, variants_of
from autoremat.step_profile.recording import FirstSteps
from autoremat.torch_private import autograd, compilers
from autoremat.torch_private.hooks import held

log = logging.getLogger("autoremat")

HIGHER_PEAKS = (0.005, 0.05)
"""Least and largest share by which the peaks of a block's plans are raised if its generated code exceeds its share."""

MOST_GIVEN_WAY = 6
"""Number of times that the blocks are planned again with higher peaks."""


def compile_blocks(
    blocks: nn.Module | Iterable[nn.Module],
    memory_budget: int | float | str | DeviceBudget | None = None,
    *,
    variants: int = 3,
    options: Mapping[str, Any] | None = None,
) -> CompiledBlocks:
    """Compiles each block in place, as ``block.compile`` does, and returns the blocks with their plans.

    Equal blocks share one graph. The graph gets at most ``variants`` plans, each is compiled once, and every block follows one
    of them. The compile time therefore does not grow with the number of blocks. All other code stays as it is.

    The budget bounds the peak of the whole step, because the memory around the blocks is measured in the second training step.
    The first two steps run without generated code, on the plans of the minimum peak. The budget counts from the first call of a
    block.

    Arguments:

    - ``blocks``: an ``nn.ModuleList``, an ``nn.Sequential`` or another iterable of modules. Their kinds may differ.
    - ``memory_budget``: the budget of the step, in bytes, as text such as "60GiB", or "auto". A float is a share of the step's
      peak without recomputation. None takes the configured budget.
    - ``variants``: the maximum number of different plans of one graph.
    - ``options``: those of ``torch.compile``. With ``accumulate``, the gradients of earlier micro-batches count.

    Raises ``OptionsError`` for arguments that are not accepted, in the second step ``StepProfileError`` if it cannot be
    measured, and in the third step ``BudgetInfeasible`` if no choice of plans fits.
    """
    return CompiledBlocks(_modules(blocks), memory_budget, variants_of(variants), options)


class CompiledBlocks(Shown):
    """Blocks that are compiled one by one. ``print`` shows which blocks follow which plan."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        memory_budget: int | float | str | DeviceBudget | None,
        variants: int,
        options: Mapping[str, Any] | None,
    ) -> None:
        """Compiles ``blocks`` in place; for the arguments see :func:`autoremat.compile_blocks`."""
        self._given = dict(options_of(options))
        if "memory_budget" in self._given:
            raise OptionsError("compile_blocks takes `memory_budget` as an argument of its own, not in `options`")
        own = {} if memory_budget is None else {"memory_budget": memory_budget}
        self._options = Options.parse({**self._given, **own}, None, compilers.inductor_config_names)
        if is_profile(self._options):
            raise OptionsError("compile_blocks takes a budget of its own, not the result of profile_step")
        refuse_open_calls(self._options, "compile_blocks", "in_flight")
        self.blocks, self.variants = tuple(blocks), variants
        self._profile: StepProfile | None = None
        self._must_fit = True
        self._without_plan = self._compiled(memory_budget=None)
        self.profile_again()
        for number, block in enumerate(self.blocks):
            autograd.install_call(block, partial(self.call, number, block))

    @property
    def profile(self) -> StepProfile | None:
        """The profile of the step, with the plan of each block; None before the memory around the blocks is known."""
        return self._profile

    def profile_again(self) -> None:
        """Measures the next two training steps and plans anew, such as for larger inputs."""
        self._profile, self._given_way = None, 0
        self._first_steps: FirstSteps | None = FirstSteps(self._options, self._has_gradients)
        self._recorded = self._compiled(memory_budget=None)

    def _has_gradients(self) -> bool:
        """Returns True if a block has a gradient. `fully_shard` and others may give it other parameters at any time."""
        return any(parameter.grad is not None for block in self.blocks for parameter in block.parameters())

    def within(self, memory_budget: int | float | str | DeviceBudget | None) -> StepProfile:
        """Plans the same step under another budget, and returns its profile. The blocks compile again at their next calls.

        Raises ``BudgetInfeasible`` if no choice of plans fits, and ``StepProfileError`` before the step is measured.
        """
        if self._profile is None:
            raise StepProfileError("the step is not measured yet: run two training steps")
        self._given_way = 0
        profile = self._profile.within(memory_budget)
        self._must_fit = profile.must_fit
        self._use(replace(profile, must_fit=True))
        return profile

    def line(self) -> str:
        """Returns the one-line representation."""
        state = "not measured yet" if self._profile is None else self._profile.line()
        return f"{len(self.blocks)} blocks, {state}"

    def tables(self) -> Sequence[PlainTable]:
        """Returns the printed tables."""
        if self._profile is not None:
            return self._profile.tables()
        return [named_figures([("blocks", str(len(self.blocks))), ("plans", "made after two training steps")])]

    def call(self, number: int, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of one call of a block."""
        if torch.compiler.is_compiling():  # a function around the block is compiled, and the block with it
            return autograd.call_without_compiling(block, *args, **kwargs)
        if not torch.is_grad_enabled():
            return self._without_plan(block, *args, **kwargs)
        with held(BLOCK, number):
            if RECEIVER.get() is not None:  # profile_step
                return self._recorded(block, *args, **kwargs)
            if self._first_steps is not None and not self._may_plan(self._first_steps):
                with held(RECEIVER, self._first_steps.compile):
                    return self._recorded(block, *args, **kwargs)
            return self._planned(block, *args, **kwargs)

    def _gives_way(self, number: int | None, error: Exception) -> bool:
        """Plans again with peaks higher by the excess for the graphs of a block whose generated code does not fit its share.

        Returns False if the code decides nothing. Raises ``BudgetInfeasible`` for the whole step if no choice of plans is left,
        or after too many tries. Under a share of the reference peak, the code runs as it is instead.
        """
        infeasible = find_cause(error, BudgetInfeasible)
        if self._profile is None or infeasible is None or number is None or self._options.compiler != "inductor":
            return False
        self._given_way += 1
        log.info("the code of block %d exceeds its share: planning the blocks again", number)
        least, most = HIGHER_PEAKS
        excess = min(max(infeasible.minimum_bytes / infeasible.budget_bytes - 1, least), most)
        try:
            if self._given_way > MOST_GIVEN_WAY:
                raise infeasible
            higher, device = self._profile.step.with_higher_peaks(number, excess), self._profile.device_ledger
            found = share_out(higher, self._profile.budget_bytes, device=device)
        except BudgetInfeasible:
            if self._must_fit:
                raise
            found = replace(self._profile, must_fit=False)
        self._use(found)
        return True

    def _may_plan(self, first: FirstSteps) -> bool:
        """Returns True if the step is measured; the budget is then divided among its graphs."""
        if first.has_ended and first.moments_found is None:
            first.settle()
        if first.moments_found is None:
            return False
        with status_if_slow("planning the blocks", shown=self._options.progress):
            now("sharing out the budget")
            found = recorded_step(first, first.moments_found, self.variants)
            request = request_of(self._options, Surroundings(torch.device(found.device)))
            profile = agreed_profile(found, request, "the profile of blocks")
            self._must_fit = profile.must_fit
            self._use(replace(profile, must_fit=True))  # other shares are tried before code over its share runs
        return True

    def _use(self, profile: StepProfile) -> None:
        """Makes the blocks follow their plans in ``profile`` from their next calls on."""
        self._profile, self._first_steps = profile, None
        self._recorded = self._compiled(memory_budget=None)  # the old one holds the recording, with all its plans
        self._planned = self._compiled(memory_budget=profile)

    def _compiled(self, memory_budget: StepProfile | None) -> Callable[..., Any]:
        """Returns a compiled function that calls a block.

        It has a code object of its own: Dynamo counts recompilations per code object, and drops none of those of others.
        """
        own = FunctionType(_call_block.__code__.replace(), _call_block.__globals__, "block")
        compiled: set[str] = set()

        def autoremat(gm: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Callable[..., Any]:
            key = graph_key(gm, inputs)
            if key in compiled and memory_budget is not None:
                warn_user(
                    f"the graph of block {BLOCK.get()} is compiled again, although an equal block has it: Dynamo found a "
                    "difference between the two, such as a number of the layer that the forward reads. TORCH_LOGS=recompiles "
                    "names it. Beyond torch._dynamo.config.recompile_limit such blocks run uncompiled and without a plan",
                    BudgetWarning,
                )
            compiled.add(key)
            while True:
                try:
                    return backend(gm, inputs, **keywords)
                except Exception as error:
                    # Not by another call of the block: with a graph break, what precedes this graph has run.
                    if not self._gives_way(BLOCK.get(), error):
                        raise
                keywords = {**keywords, "options": {**given, "memory_budget": self._profile}}

        given = {key: value for key, value in self._given.items() if key != "accumulate"}  # the profile counts gradients
        options: dict[str, Any] = {**given, "memory_budget": memory_budget}
        return torch.compile(own, backend=autoremat, options=options)


def _call_block(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of the block ``self``. The name of the argument keeps it out of module paths."""
    return autograd.call_without_compiling(self, *args, **kwargs)


def _modules(blocks: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the blocks, each once. Raises ``OptionsError`` for anything that is no container of modules."""
    given = blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks
    found: list[Any] = list(given) if isinstance(given, Iterable) else [blocks]
    wrong = next((type(block).__name__ for block in found if not isinstance(block, nn.Module)), None)
    if not found or wrong is not None or not isinstance(given, Iterable):
        is_what = "is empty" if not found else f"has a {wrong}" if wrong else f"is a {type(blocks).__name__}"
        raise OptionsError(f"`blocks` {is_what}. Accepted: an nn.ModuleList, an nn.Sequential or a list of modules")
    numbers = {block: number for number, block in enumerate(dict.fromkeys(found))}
    for block, number in numbers.items():
        if autograd.is_optimized(block):
            raise OptionsError(f"block {number} is a result of torch.compile: pass the module that it compiles")
        inner = next((numbers[part] for part in block.modules() if part is not block and part in numbers), None)
        if inner is not None:
            raise OptionsError(f"block {number} contains block {inner}: a block is compiled as a whole, so pass one of them")
    return list(numbers)
