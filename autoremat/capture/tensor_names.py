"""Names for tensors, given in the model, by which orders can point at them.

    q = autoremat.name(self.q_proj(x), "q_proj")      # options={"save": ["q_proj"]}

``name`` calls the op ``torch.ops.autoremat.named``, which returns its argument. It consists of nothing, so every compiler
traces straight through it. Our backend takes it out of Dynamo's graph (``origins.take_names``).
"""

from __future__ import annotations

import torch

_library = torch.library.Library("autoremat", "DEF")  # type: ignore[no-untyped-call]
_library.define("named(Tensor(a) tensor, str name) -> Tensor(a)")  # type: ignore[no-untyped-call]
_library.impl("named", lambda tensor, name: tensor, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def name(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor`` itself, called ``name`` in orders (``save=[name]``). A view stands for the storage that it looks at.

    Does nothing by itself, in eager code and under other compilers alike.
    """
    named: torch.Tensor = torch.ops.autoremat.named(tensor, name)
    return named
