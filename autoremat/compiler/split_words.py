"""How texts name the parts of a split graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoremat.torch_private.split_graphs import Split


@dataclass(frozen=True)
class Words:
    """How texts name the parts of a graph, and how to compile it as a whole."""

    part: str
    cause: str
    whole: str
    loss: str
    """What the graph as a whole lacks."""
    advice: str = ""

    @property
    def parts(self) -> str:
        """The name of all parts."""
        return f"{self.part}s {self.cause}"


_BUCKETS = Words(
    "bucket",
    "of DistributedDataParallel",
    "torch._dynamo.config.optimize_ddp = False",
    "overlaps no communication",
    "; gradient_as_bucket_view=True keeps no second copy of the gradients",
)

_PARTS = Words("part", "for early gradients", "early_gradients=False", "hands over all gradients at its end")

_PARTS_THAT_KEEP = replace(
    _PARTS,
    advice="; gradients count as kept to the end of the step. If the hooks free them, hooks_free_gradients=True says so",
)


def words_of(split: Split) -> Words:
    """Returns how texts name the parts of ``split``."""
    if split.hooks is None:
        return _BUCKETS
    return _PARTS_THAT_KEEP if split.hooks.are_unknown else _PARTS


def advice_of(split: Split) -> str:
    """Returns the advice for an error whose figures are those of all parts."""
    words = words_of(split)
    more = f"; early_gradients={2 * split.count} frees gradients earlier, in more parts" if words is _PARTS else ""
    return (
        f"the figures are those of the {split.count} {words.parts} together. {words.whole} compiles them as one graph, which "
        f"shares memory better and {words.loss}{words.advice}{more}"
    )
