"""Tuning constants of the planner. Each one trades plan quality against time.

Numerical tolerances and encodings stay in the modules that need them. Work is counted in executions, moves, columns and the
like, so plans do not depend on the speed of the machine.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """All settings, in the sequence in which a search meets them."""

    least_form_bytes: int = 2**20
    """Bytes from which a value has forms. Below, the latency of a copy outweighs the bytes, and there are too many values."""

    # -- minimum cuts, and the local search from them --------------------------------------------------------------------

    search_share: float = 0.8
    """Share of the work of a search after which no further plan is simulated; the lower bounds have the rest. Minimum cuts end
    at half of it. The search for the least peak has this part of the work of a search for a budget. The search on a
    single-phase graph has half of it of the time limit, and annealing half of what is left."""
    levels: int = 12
    """Most minimum cuts, and ops in a row whose cuts raise the bound on the peak no further. Of a graph that shares its budget,
    also levels of the peak and of the saved bytes to which plans are brought down, and plans that are considered if its calls
    may have different ones. Halvings for the least peak by stays."""
    near: int = 3
    """Number of starts on each side of a budget that the local search solves, of starts for the least peak, of solved starts
    from which trials begin, and of gaps in which a trial drops values at most."""
    trials: int = 96
    """Number of trials in a row without an improvement after which they end."""
    stretches: int = 8
    """A ruined stretch is at most this part of the backward. Lower bounds have a program point in each of so many stretches, or
    of twice as many of a single-phase graph. The search for the least peak gives each start this part of its work."""
    options: int = 24
    """Number of ranges whose drops are priced at one execution, the largest first."""
    refusals: int = 8
    """Number of single drops in a row that the simulator refuses, after which a plan is not brought further down. A batch ends
    after as many full executions at which no drop helps."""
    step: float = 0.03
    """Share of the least peak found by which the next target is lower. Targets within a time are this and down to a 32nd of it
    lower. Second placements stay below the budget by as much."""
    good_gap: float = 0.001
    """Distance to the lower bound at which a search or an integer program ends, as a share of the step or of the bound. One
    more plan per graph of a step must save as much."""
    rough_gap: float = 0.01
    """The same for a plan of a training step that ``auto`` has made, and for a choice of several plans of one graph. One more
    plan per graph must save as much of the added seconds, too."""

    # -- plans assigned to the graphs of a step --------------------------------------------------------------------------

    effort: float = 10.0
    """Limit on CP-SAT's deterministic time, which is about seconds, for one number of plans per graph."""

    # -- ``autoremat.plan``, which runs all methods one after another ----------------------------------------------------

    columns: int = 1500
    """Columns up to which the interval model of a graph is small, and those per second that ``"ilp"`` alone may take."""
    nodes: int = 2000
    """Maximum number of branch-and-bound nodes of one solution."""
    moves_per_second: int = 4000
    """Moves of annealing per second of the time limit, one half of them from the best plan."""
    temperature: float = 3.0
    """First temperature in mean seconds of an op; a tenth of it for a search from a good plan. The last one is a hundredth."""
    price: float = 0.05
    """First and lowest price of an excess byte at one site, in mean seconds of an op per mean bytes of a value. The highest one
    is its inverse."""
    price_change: float = 0.1
    """Part by which the price rises for a state that does not fit, and falls for one that fits."""
    move_recomputations: int = 10
    """Maximum number of recomputations of one move."""


settings = Settings()
