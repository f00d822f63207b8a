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

    starts_share: float = 0.4
    """Share of the work of a search after which no further minimum cut is a start."""
    plans_share: float = 0.9
    """Share of the work of a search after which no further plan is simulated. The lower bounds have the rest."""
    least_peak_share: float = 0.8
    """Work of the search for the least peak, as a share of that for a budget. The same share of it goes to drops."""
    quick_share: float = 0.2
    """Work of the first moves towards the least peak, as a share of that of a search for a budget."""
    levels: int = 12
    """Most minimum cuts. Of a graph that shares its budget, also levels of the peak to which plans are brought down, and plans
    that are considered if its calls may have different ones."""
    saved_levels: int = 8
    """Number of levels of the saved bytes for which plans are found if a graph shares its budget with others."""
    near: int = 4
    """Number of starts on each side of a budget that the local search solves."""
    few: int = 2
    """Number of solved starts from which trials begin, and of starts on each side of a level of the peak."""
    lowest_starts: int = 3
    """Number of starts, those of the least peaks, of the search for the least peak."""
    trial_work: int = 15_000
    """Number of trials in a row without an improvement after which they end, times the number of forward ops."""
    trials: tuple[int, int] = (16, 96)
    """Minimum and maximum of that number."""
    stretches: int = 8
    """A ruined stretch is at most this part of the backward. Lower bounds have a program point in each of so many stretches, or
    of twice as many of a single-phase graph."""
    ruined_gaps: int = 4
    """Most gaps in which a trial drops values."""
    shortest_gap: int = 8
    """Executions between two uses, above which a trial may drop a value there."""
    options: int = 24
    """Number of ranges whose drops are priced at one execution, the largest first."""
    executions: int = 6
    """Number of full executions at which no drop helps, after which a batch ends."""
    refusals: int = 8
    """Number of single drops in a row that the simulator refuses, after which a plan is not brought further down."""
    step: float = 0.03
    """Share of the least peak found by which the next target is lower."""
    good_gap: float = 0.001
    """Distance to the lower bound at which a search or an integer program ends, as a share of the step or of the bound."""
    rough_gap: float = 0.01
    """The same for a plan of a training step that ``auto`` has made, and for a choice of several plans of one graph."""
    large_gain: float = 0.3
    """Share of the cost above the least one by which stays must lower it, to leave out trials without stays."""
    soft_budget_cost: float = 0.05
    """Maximum cost of a plan within the soft budget over the fastest plan, as a share of the step, by the cost model."""
    time_levels: int = 128
    """Number of equal steps between the bound on the peak and the peak of the fastest plan, for a budget of time."""
    time_steps: tuple[float, ...] = (0.001, 0.005, 0.02)
    """Shares of the least peak found within a time by which the targets of trials are lower."""
    free_slowdown: float = 0.005
    """Share of the step that ``max_slowdown="free"`` allows. Repeated measurements of one step differ by more."""
    splits: int = 4
    """Number of splits of a single-phase graph, all at its fullest ops."""
    peak_cuts: int = 300_000
    """Number of minimum cuts for the bound on the peak, times the nodes of the network."""
    fewest_peak_cuts: int = 20
    """Minimum of that number."""

    # -- stays -----------------------------------------------------------------------------------------------------------

    goals: tuple[float, ...] = (0.0, 0.0, 0.01, 0.03)
    """Shares of the budget by which the rounds of placement stay below it. Each one knows when the one before loads values."""
    load_lead: float = 1.3
    """Lead of a load before its need in the first round, in times of the seconds of the load."""
    quarters: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    """Peaks that stays bring down to the budget, as shares of the bytes that the link carries beyond it. All but the last are
    also shares of a value in a linear program from which it is saved."""
    lowered_peaks: int = 5
    """Number of peaks to which a plan is brought down at most, for the least peak."""
    program_budgets: tuple[float, ...] = (1.0, 1.0, 0.97, 0.94)
    """Budgets of the linear programs, as shares of the budget. Each program knows the bytes of the plan of the one before."""
    program_work: int = 4_400
    """Forward ops times the programs in a row that bring no cheaper plan, after which no further one is solved."""
    programs: int = 4
    """Maximum of that number, and of solutions of an integer program, each but the first with the bytes that the model counts
    and the simulator does not."""
    program_points: tuple[int, int] = (32, 48)
    """Numbers of points of the forward and of the backward in the linear program."""
    trial_levels: tuple[float, ...] = (1.0, 0.99, 0.97)
    """Peaks of the plans of trials before stays, as shares of that of the cheapest plan."""

    # -- plans assigned to the graphs of a step --------------------------------------------------------------------------

    efforts: tuple[float, float] = (30.0, 1.0)
    """Limits on CP-SAT's deterministic time, which is about seconds, for one plan per graph and for several."""
    worth_of_a_plan: float = 0.02
    """Share of the added seconds that one more plan per graph must save."""
    worth_in_the_step: float = 0.001
    """Share of the step's seconds that one more plan per graph must save."""

    # -- ``autoremat.plan``, which runs all methods one after another ----------------------------------------------------

    single_phase_search_share: float = 0.5
    """Share of the time limit for the search on a single-phase graph, whose splits seldom give the best plans."""
    annealing_end: float = 0.75
    """Share of the time limit after which annealing ends, to leave time for the integer program."""
    columns: int = 1500
    """Columns up to which the interval model of a graph is small, and those per second that ``"ilp"`` alone may take."""
    depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Depths of the models that are tried."""
    nodes: int = 2000
    """Maximum number of branch-and-bound nodes of one solution."""
    penalty: float = 64.0
    """Penalty of an excess as large as the baseline's peak, in steps."""
    moves_per_second: int = 4000
    """Moves of annealing per second of the time limit."""
    temperatures: tuple[float, float, float] = (3.0, 0.3, 0.03)
    """First temperatures of a search from nothing and of one from a good plan, and the last one, in mean seconds of an op."""
    prices: tuple[float, float, float] = (0.05, 0.02, 50.0)
    """First, lowest and highest price of an excess byte at one site, in mean seconds of an op per mean bytes of a value."""
    price_changes: tuple[float, float] = (1.02, 0.97)
    """Factors of the price for a state that does not fit, and for one that fits."""
    removals: tuple[float, float, float] = (0.35, 0.6, 0.15)
    """Probabilities that a move removes a recomputation: for states that do not fit, that fit, and to do nothing else."""
    annealed_share: float = 0.2
    """Share of the moves that anneal the best plan once more, and the most of the first search from nothing."""
    first_search_moves_per_op: int = 300
    """Maximum length of the first search from nothing, in moves per op."""
    input_probability: float = 0.6
    """Highest probability that a move also recomputes a freed input instead of retaining it."""
    move_recomputations: int = 10
    """Maximum number of recomputations of one move."""
    early_probability: float = 0.2
    """Probability that an evicted value is recomputed before its next read, while its inputs may still be live."""
    draws: int = 60
    """Number of values that are drawn before a site counts as having no value to evict."""


settings = Settings()
