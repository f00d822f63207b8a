"""Tuning constants of the planner. Each one trades plan quality against time.

Numerical tolerances and encodings stay in the modules that need them. Work is counted in executions, moves, columns and the
like, so plans do not depend on the speed of the machine.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """All settings, in the sequence in which a search meets them."""

    long_range_share: float = 0.35
    """Lifetime, as a share of the forward's ops, above which a value is long-range and ends no segment."""
    long_range_ops: int = 12
    """Lifetime in ops up to which a value is never long-range, so that short forwards have cuts too."""
    least_form_bytes: int = 2**20
    """Bytes from which a value has forms. Below, the latency of a copy outweighs the bytes, and there are too many values."""

    # -- minimum cuts, and the local search from them --------------------------------------------------------------------

    search_share: float = 0.8
    """Share of the work of a search after which no further plan is simulated; the lower bounds have the rest. Minimum cuts end
    at half of it. The search for the least peak has this part of the work of a search for a budget."""
    levels: int = 12
    """Most minimum cuts. Of a graph that shares its budget, also levels of the peak and of the saved bytes to which plans are
    brought down, and plans that are considered if its calls may have different ones. Halvings for the least peak by stays."""
    near: int = 3
    """Number of starts on each side of a budget that the local search solves, of starts for the least peak, of solved starts
    from which trials begin, and of gaps in which a trial drops values at most."""
    trials: int = 96
    """Number of trials in a row without an improvement after which they end."""
    stretches: int = 8
    """A ruined stretch is at most this part of the backward. Lower bounds have a program point in each of so many stretches, or
    of twice as many of a single-phase graph."""
    shortest_gap: int = 8
    """Executions between two uses, above which a trial may drop a value there."""
    options: int = 24
    """Number of ranges whose drops are priced at one execution, the largest first."""
    refusals: int = 8
    """Number of single drops in a row that the simulator refuses, after which a plan is not brought further down. A batch ends
    after as many full executions at which no drop helps."""
    step: float = 0.03
    """Share of the least peak found by which the next target is lower. Targets within a time are
    this and down to a 32nd of it lower. Second placements stay below the budget by as much."""
    good_gap: float = 0.001
    """Distance to the lower bound at which a search or an integer program ends, as a share of the step or of the bound. One
    more plan per graph of a step must save as much."""
    rough_gap: float = 0.01
    """The same for a plan of a training step that ``auto`` has made, and for a choice of several plans of one graph."""
    soft_budget_cost: float = 0.05
    """Maximum cost of a plan within the soft budget over the fastest plan, as a share of the step, by the cost model."""
    free_slowdown: float = 0.005
    """Share of the step that ``max_slowdown="free"`` allows. Repeated measurements of one step differ by more."""
    peak_cuts: int = 300_000
    """Number of minimum cuts for the bound on the peak, times the nodes of the network."""

    # -- stays -----------------------------------------------------------------------------------------------------------

    program_points: int = 32
    """Number of points of each half in the linear program."""

    # -- plans assigned to the graphs of a step --------------------------------------------------------------------------

    efforts: tuple[float, float] = (30.0, 1.0)
    """Limits on CP-SAT's deterministic time, which is about seconds, for one plan per graph and for several."""
    worth_of_a_plan: float = 0.02
    """Share of the added seconds that one more plan per graph must save."""

    # -- ``autoremat.plan``, which runs all methods one after another ----------------------------------------------------

    single_phase_share: float = 0.5
    """Share of the time limit for the search on a single-phase graph, whose splits seldom give the best plans. Annealing has
    half of what is left."""
    columns: int = 1500
    """Columns up to which the interval model of a graph is small, and those per second that ``"ilp"`` alone may take."""
    programs: int = 4
    """Maximum number of solutions of one model, each but the first with the bytes that it counts and the simulator does not."""
    nodes: int = 2000
    """Maximum number of branch-and-bound nodes of one solution."""
    penalty: float = 64.0
    """Penalty of an excess as large as the baseline's peak, in steps."""
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
