"""Names for tensors, given in the model. Constraints refer to tensors by these names.

    q = autoremat.name(self.q_proj(x), "q_proj")      # options={"save": ["q_proj"]}

``name`` calls the op ``torch.ops.autoremat.named``, which returns its argument. The op has no kernel of its own, so every
compiler traces through it. Our backend removes it from Dynamo's graph (``source_info.take_names``).
"""

import torch

_library = torch.library.Library("autoremat", "DEF")  # type: ignore[no-untyped-call]
_library.define("named(Tensor(a) tensor, str name) -> Tensor(a)")  # type: ignore[no-untyped-call]
_library.impl("named", lambda tensor, name: tensor, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def name(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Returns ``tensor`` itself, which constraints can now refer to by ``name`` (``save=[name]``).

    The name of a view applies to its storage. The call has no other effect, in eager code or under other compilers.
    """
    named: torch.Tensor = torch.ops.autoremat.named(tensor, name)
    return named
