"""What people do today about activation memory, on small models of the kinds that they do it with, uncompiled."""

from collections import Counter
from collections.abc import Sequence

import pytest
import stays
import torch
from captured import planned
from models import build
from oracles import measured_step
from processes import group_of
from sharded_models import TOKENS, tensor_parallel_decoder
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat import host_memory
from autoremat.basics import environment
from autoremat.basics.errors import ConstraintWarning
from autoremat.capture import forms
from autoremat.planner.settings import Settings
from autoremat.report.decisions import Decision
from autoremat.request import surroundings
from autoremat.request.surroundings import free_device_bytes

MIB = 1 << 20


@pytest.mark.slow
def test_auto_recomputes_no_more_than_a_full_device_asks_for(monkeypatch):
    model, inputs = build("llama", layers=2)
    planned(model, *inputs)
    fastest = autoremat.reports()[-1]
    least = fastest.minimum_peak_bytes
    added = []
    for free in (least + 4 * MIB, 1 << 34):
        monkeypatch.setattr(surroundings, "free_device_bytes", lambda device, free=free: free)
        _, compiled = planned(model, *inputs, memory_budget="auto", auto_headroom="1MiB")
        report = autoremat.reports()[-1]
        assert report.budget_bytes == free - MIB
        assert measured_step(compiled, model, inputs) <= report.predicted_peak_bytes <= report.budget_bytes
        added.append(report.recompute_seconds)
    assert added[0] > added[1] == fastest.recompute_seconds
    monkeypatch.setenv(environment.BUDGET, "auto")  # for who can only name a backend
    planned(model, *inputs)
    assert autoremat.reports()[-1].budget_bytes == (1 << 34) - autoremat.Options().auto_headroom


@pytest.mark.gpu
def test_auto_is_what_the_device_has_free():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))).cuda()
    planned(lambda x: model(x).square().mean(), torch.randn(1024, 256, device="cuda"), memory_budget="auto", auto_headroom=0)
    free = free_device_bytes(torch.device("cuda"))
    assert free is not None
    assert abs(autoremat.reports()[-1].budget_bytes - free) <= 1024 * MIB  # other processes allocate too


@pytest.mark.slow
def test_to_checkpoint_flash_attention_is_refused_as_useless():
    model, (tokens,) = build("llama", layers=2)
    with pytest.warns(ConstraintWarning, match="recomputes nothing: .* fused attention, and needs no checkpoint"):
        seen, _ = planned(model, tokens, policy="selective")
    assert not seen.plan.recomputed


@pytest.mark.slow
def test_what_the_planner_recomputes_first_is_softmax_and_not_products():
    model, (tokens,) = build("gpt2")
    seen, compiled = planned(model, tokens, memory_budget=0.75)
    again = Counter(target for _, target in seen.recomputed())
    assert again["aten._safe_softmax.default"] >= 3  # of 4
    assert not {"aten.addmm.default", "aten.mm.default", "aten.native_dropout.default"} & set(again)
    report = autoremat.reports()[-1]
    assert measured_step(compiled, model, (tokens,)) <= report.budget_bytes


def bytes_of_save_on_cpu(model: nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """The bytes that ``torch.autograd.graph.save_on_cpu`` copies in an eager step: every saved tensor, but no parameter."""
    kept = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *inputs)}
    copied = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal copied
        copied += 0 if tensor.untyped_storage().data_ptr() in kept else tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs).backward()
    return copied


@pytest.mark.slow
def test_cpu_offload_moves_what_is_dear_to_recompute_and_no_more_than_the_budget_asks(monkeypatch):
    model, inputs = build("llama", layers=2)
    monkeypatch.setattr(forms, "settings", Settings(least_form_bytes=2**14))
    planned(model, *inputs)
    least, enough = autoremat.reports()[-1].minimum_peak_bytes, autoremat.reports()[-1].predicted_peak_bytes
    planned(model, *inputs, memory_budget=least)
    alone, moved = autoremat.reports()[-1], []
    with host_memory.stand_in():
        for budget in (least, enough):
            model.zero_grad(set_to_none=True)
            _, compiled = planned(model, *inputs, memory_budget=budget, host_memory="1GiB")
            report, before = autoremat.reports()[-1], stays.statistics("cpu")
            assert measured_step(compiled, model, inputs) <= report.predicted_peak_bytes <= report.budget_bytes
            assert report.recompute_seconds + report.stall_seconds < alone.recompute_seconds
            moved.append(stays.statistics("cpu").to_host_bytes - before.to_host_bytes)
            assert moved[-1] == report.host_peak_bytes == report.moved_bytes
    assert 0 == moved[1] < moved[0] < bytes_of_save_on_cpu(model, inputs)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_distributed_saved_activations_keep_a_part_of_each_layers_input_on_each_rank(monkeypatch):
    monkeypatch.setattr(forms, "settings", Settings(least_form_bytes=1024))
    options = {"compiler": "aot_eager", "memory_budget": 1, "on_infeasible": "best_effort", "interconnect_bandwidth": 1e12}
    with group_of(8, rank=3):
        decoder, tokens = tensor_parallel_decoder(layers=4, width=64), torch.randint(TOKENS, (8, 128))
        found = [
            autoremat.explain(decoder, tokens, options=options | {"store": store, "policy": "full"})
            for store in (("device",), ("device", "shards"))
        ]
    whole, parts = found
    inputs = [value for value in parts.values if value.decision is Decision.SHARDED]
    assert {value.op for value in inputs} <= {"_c10d_functional.all_reduce.default", "aten.mul.Tensor", "aten.add.Tensor"}
    assert len(inputs) >= 3  # of 4 layers
    assert stays.bytes_on_device(parts) == stays.bytes_of_stays(parts) // 8
    assert parts.predicted_peak_bytes < whole.predicted_peak_bytes


def test_inputs_of_frozen_layers_are_not_saved():
    saved = {}
    for trained in (True, False):
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        layers[1:].requires_grad_(trained)
        seen, _ = planned(lambda x, layers=layers: nn.Sequential(*layers)(x).square().mean(), torch.randn(512, 64))
        saved[trained] = {module for module, _ in seen.saved()}
    assert saved == {True: {"0", "1", "2", "3"}, False: {"3"}}  # of the last the loss needs its output


def test_reentrant_or_not_is_the_same():
    recomputed = []
    for reentrant in (True, False):
        first, inner, last = (nn.Linear(32, 32) for _ in range(3))

        def step(x, first=first, inner=inner, last=last, reentrant=reentrant):
            hidden = checkpoint(lambda y: torch.tanh(inner(torch.tanh(y))), first(x), use_reentrant=reentrant)
            return last(hidden).square().mean()

        seen, _ = planned(step, torch.randn(64, 32))
        recomputed.append([target for _, target in seen.recomputed()])
    assert recomputed[0] == recomputed[1]
    assert "aten.addmm.default" in recomputed[0]
