"""The only importer of torch's private names. It decides nothing about plans.

``VERSIONS`` has the names that not every supported version has. All others are imported where they are used.

The import raises ``UnsupportedTorchError`` unless the package supports the torch version. ``AUTOREMAT_NEWER_TORCH=1`` lets
later versions in, to see what they break.
"""

import importlib
import inspect
import re
from typing import Any

import torch

from autoremat.basics.environment import NEWER_TORCH, said
from autoremat.basics.errors import SUPPORTED_MINORS, UnsupportedTorchError


def check_torch_version(version: str = torch.__version__) -> None:
    """Raises ``UnsupportedTorchError`` unless the package supports the torch version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    minor = int(match[2]) if match is not None and int(match[1]) == 2 else -1
    if minor not in SUPPORTED_MINORS and (minor < SUPPORTED_MINORS.stop or said(NEWER_TORCH) != "1"):
        raise UnsupportedTorchError(version)


check_torch_version()


MINOR = int(torch.__version__.split(".")[1])
"""The minor version of the torch that runs."""

VERSIONS = {
    "torch._dynamo.convert_frame:CatchErrorsWrapper._handle_skip": range(13, 99),
    "torch._functorch.compile_utils:fx_graph_cse(extra_node_key)": range(14, 99),
    "torch._functorch.partitioners:_extract_fwd_bwd_modules(saved_opaque_nodes)": range(12, 99),
    "torch._functorch.partitioners:is_opaque_node": range(12, 99),
    "torch._inductor.codegen.cpp:CppVecKernel._use_parallel_atomic_add": range(14, 99),
    "torch._inductor.codegen.triton:TritonOverrides._can_use_4x_random": range(13, 99),
    "torch._inductor.config:use_rand4x": range(15, 99),
    "torch._C:_accelerator_getAllocatorSettings": range(12, 99),
    "torch.fx.experimental.symbolic_shapes:optimization_hint": range(12, 99),
    "torch.fx.experimental.symbolic_shapes:size_hint": range(11, 12),
    "torch.fx.traceback:MEMORY_BUDGET_ANNOTATION_KEY": range(13, 99),
}
"""Places, ``module:path`` or ``module:path(parameter)``, with the minor versions of torch that have them and that use them."""


def resolve(*places: str) -> Any:
    """Returns the object at the first place that this torch has, or the name of its parameter; None if it has none of them."""
    place = next((place for place in places if MINOR in VERSIONS[place]), None)
    if place is None:
        return None
    module, _, path = place.partition(":")
    path, _, parameter = path.rstrip(")").partition("(")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    if parameter and parameter not in inspect.signature(found).parameters:
        raise AttributeError(place)
    return parameter or found
