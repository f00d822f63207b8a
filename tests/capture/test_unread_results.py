"""Results that no op reads: generated code does not name them, and they need memory while the call runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch.nn import functional as F
from trained_steps import trained
from wrapper_sources import replay_peak

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "values of a sort": lambda y: torch.sort(y, dim=-1).values,
    "indices of a sort": lambda y: torch.sort(y, dim=-1).indices.float(),
    "cumulative maximum": lambda y: torch.cummax(y, -1).values,
    "maxima of fractional windows": lambda y: F.fractional_max_pool2d(y.reshape(1, 2, 1024, 512), 2, output_size=256),
    "singular values": lambda y: torch.linalg.svd(y[:512, :512]).S,
    "eigenvalues": lambda y: torch.linalg.eigh(y[:512, :512]).eigenvalues,
    "determinant": lambda y: torch.linalg.slogdet(y[:512, :512]).logabsdet,
}
QUICK = ("values of a sort", "eigenvalues")


def counted_and_measured(function: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """Returns the counted peak of a step with the results of ``function``, which has no gradient, and the measured one."""
    x, weight = torch.randn(1024, 64), torch.randn(64, 1024, requires_grad=True)

    def loss() -> Tensor:
        y = x @ weight
        return y.square().sum() + function(y.detach()).mean()

    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        found = trained(loss, [weight], memory_budget=1.0, compiler="inductor")
    return found.report.peak_bytes, found.peak


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS])
def test_the_counted_peak_covers_results_that_no_op_reads(name: str) -> None:
    counted, measured = counted_and_measured(FUNCTIONS[name])
    assert measured <= counted


CODE = """
def call(args):
    buf0 = torch.ops.aten.sort.default(arg0)
    buf1 = buf0[0][0]
    del buf0
    buf3 = empty_strided_cpu((4,), (1,), torch.float32)
    return (buf1, buf3)
"""


@pytest.mark.parametrize(("results", "expected"), [((), 16 + 16), (("buf1", "buf2"), 16 + 32)])
def test_the_replay_frees_them_with_the_tuple_of_results(results: tuple[str, ...], expected: int) -> None:
    sizes = {"buf1": 16, "buf2": 32}
    found = replay_peak(CODE, {}, lambda name: sizes.get(name, 0), results=lambda name: results if name == "buf0" else ())
    assert found == expected
