"""Joint graphs that others capture are planned and split: equal gradients, peaks as planned, errors for what has no plan."""

import subprocess
import sys

import pytest
import torch
from block_models import MeanSquare
from folders import ROOT
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.aot_autograd import aot_module
from trained_steps import LEAST

import autoremat

EXAMPLES = ["aot_function", "graph_trainer", pytest.param("inductor", marks=pytest.mark.slow)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.norm(self.linear(x))), 0.2)


def Training() -> nn.Module:
    """Layers with dropout, an average that moves, and the loss."""
    torch.manual_seed(0)
    return MeanSquare(*(Layer() for _ in range(4)))


def trained(step: nn.Module, training: nn.Module) -> list[Tensor]:
    """The gradients and the buffers after one step from fixed random numbers."""
    torch.manual_seed(1)
    training.zero_grad()
    step(torch.randn(256, 32)).backward()
    return [
        *(parameter.grad.clone() for parameter in training.parameters()),
        *(buffer.clone() for buffer in training.buffers()),
    ]


def compiled_by(partition) -> list[Tensor]:
    training = Training()
    return trained(aot_module(training, fw_compiler=boxed_nop, partition_fn=partition), training)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_and_keeps_its_peak(name):
    done = subprocess.run([sys.executable, ROOT / "examples" / "joint_graphs" / f"{name}.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1].split()
    before, after = (float(line[place - 1]) for place, word in enumerate(line) if word.startswith("MiB"))
    assert after < 0.7 * before


def test_every_example_is_short_and_tested():
    files = sorted((ROOT / "examples" / "joint_graphs").glob("*.py"))
    assert [path.stem for path in files] == ["aot_function", "graph_trainer", "inductor"]
    assert all(len(path.read_text().splitlines()) <= 60 for path in files)


@pytest.mark.parametrize("budget", [0.5, 0.8, None])
def test_a_partitioner_computes_what_eager_computes(budget):
    training = Training()
    expected = trained(training, training)
    found = compiled_by(autoremat.partitioner({"memory_budget": budget, "compiler": "aot_eager"}))
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_plain_inductor_draws_the_same_numbers_under_a_partitioner():
    results = []
    for partitioner in (None, autoremat.partitioner({"memory_budget": 1, "on_infeasible": "best_effort"})):
        torch.compiler.reset()
        training = Training()
        with torch._inductor.config.patch(custom_partitioner_fn=partitioner):
            results.append(trained(torch.compile(training), training))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_plan_leaves_the_joint_graph_as_it_is_and_is_what_the_halves_do():
    plans = []

    def partition(joint: fx.GraphModule, joint_inputs, *, num_fwd_outputs, static_lifetime_input_indices=None, **keywords):
        before = joint.print_readable(print_output=False)
        planned = autoremat.plan_joint(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, options=LEAST)
        assert joint.print_readable(print_output=False) == before
        forward, backward = autoremat.apply_plan(planned)
        plans.append((planned, forward, backward))
        return forward, backward

    compiled_by(partition)
    [(planned, forward, backward)] = plans
    again = {planned.plan.graph.ops[index].name for index in planned.plan.recomputed}
    assert len(again) >= 4
    copies = [node.meta["autoremat_recompute_of"] for node in backward.graph.nodes if "autoremat_recompute_of" in node.meta]
    assert again <= {getattr(name, "name", name) for name in copies}
    assert planned.report.predicted_peak_bytes == planned.plan.peak_bytes < planned.report.baseline_peak_bytes


def test_a_budget_that_no_plan_keeps_is_an_error():
    with pytest.raises(autoremat.BudgetInfeasible):
        compiled_by(autoremat.partitioner({"memory_budget": "1KiB", "compiler": "aot_eager"}))


@pytest.mark.parametrize("budget", ["auto", autoremat.DeviceBudget(2**30, ())])
def test_budgets_that_need_a_running_step_are_refused(budget):
    with pytest.raises(autoremat.OptionsError, match="needs a step that runs"):
        autoremat.partitioner({"memory_budget": budget})
