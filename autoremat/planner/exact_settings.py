"""Tuning constants of the exact solvers (:mod:`autoremat.planner.exact`). :mod:`.settings` says how work is counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TimeIndexedBoundSettings:
    """Lower bound by one linear program over many program points (:mod:`autoremat.planner.exact.time_indexed_bound`)."""

    maximum_stages: int = 48
    """Maximum number of stages of the backward."""
    maximum_columns: int = 60_000
    """Approximate number of columns above which there are fewer stages."""
    exact_columns: int = 16_000
    """Number of columns up to which a program is solved exactly."""
    nodes: int = 200
    """Maximum number of branch-and-bound nodes of a program that is solved exactly."""
    iterations: int = 20_000
    """Maximum number of iterations of the approximate solver of relaxations."""
    time_share: float = 0.3
    """Maximum time of the bound, as a share of the time limit."""


@dataclass(frozen=True)
class LocalSearchSettings:
    """Moves of annealing and redundant-recompute elimination (:mod:`autoremat.planner.exact.local_search`)."""

    input_probability: float = 0.6
    """Highest probability that a move also recomputes a freed input instead of retaining it."""
    move_recomputations: int = 10
    """Maximum number of recomputations of one move."""
    early_probability: float = 0.2
    """Probability that an evicted value is recomputed before its next read, while its inputs may still be live."""
    draws: int = 60
    """Number of values that are drawn before a site counts as having no value to evict."""
    reordered_recomputations: int = 12
    """Maximum number of recomputations at one site for which another sequence than the graph's is tried."""


@dataclass(frozen=True)
class AnnealingSettings:
    """Simulated annealing over insertion points (:mod:`autoremat.planner.exact.annealing`)."""

    moves_per_second: int = 4000
    """Moves per second of the time limit. The number is low enough to leave time for large-neighbourhood search."""
    initial_temperature: float = 3.0
    """First temperature of a search from nothing, in mean seconds of an op."""
    warm_start_temperature: float = 0.3
    """First temperature of a search from a good plan, in mean seconds of an op."""
    final_temperature: float = 0.03
    """Last temperature, in mean seconds of an op."""
    initial_price: float = 0.05
    """First price of an excess byte at one site, in mean seconds of an op per mean bytes of a value."""
    minimum_price: float = 0.02
    """Lowest price, in the unit of the first one."""
    maximum_price: float = 50.0
    """Highest price, in the unit of the first one."""
    price_increase: float = 1.02
    """Factor of the price for a state that does not fit."""
    price_decrease: float = 0.97
    """Factor of the price for a state that fits."""
    update_moves: int = 64
    """Number of moves between two updates of price and temperature."""
    removal_probability: float = 0.35
    """Probability that a move removes a recomputation, for states that do not fit."""
    removal_probability_when_fitting: float = 0.6
    """Probability that a move removes a recomputation, for states that fit."""
    removal_only_probability: float = 0.15
    """Probability that a move removes a recomputation and does nothing else."""
    recomputations_per_use: int = 5_000
    """Maximum number of recomputations of a plan that recomputes every value for each use. It is enough for a chain of 100
    ops."""
    warm_start_share: float = 0.2
    """Share of the moves that anneal the best plan once more."""
    first_search_share: float = 0.2
    """Maximum length of the first search from nothing, as a share of the moves."""
    first_search_moves_per_op: int = 300
    """Maximum length of the first search from nothing, in moves per op."""


@dataclass(frozen=True)
class EliminationSettings:
    """Redundant-recompute elimination (:mod:`autoremat.planner.exact.polish`)."""

    exchange_candidates: int = 1_000
    """Number of possible recomputations up to which exchanges are tried."""
    minimum_gain: float = 1e-6
    """Least gain of an exchange, in mean seconds of an op."""


@dataclass(frozen=True)
class IntervalModelSettings:
    """Size of interval models, and first plans from their relaxations (:mod:`autoremat.planner.exact.driver`)."""

    columns_per_second: int = 1500
    """Maximum number of columns of a model, per second of the time limit. Its relaxation leaves time for neighbourhoods."""
    depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Depths of the models that are tried, as long as they are not too large."""
    first_plan_depth: int = 2
    """Depth up to which models give first plans."""
    first_plan_nodes: int = 200
    """Maximum number of branch-and-bound nodes of a first plan, which uses only columns of the relaxations."""
    first_plan_gap: float = 1e-2
    """Relative gap at which the program of the first plan counts as solved."""
    first_plan_penalty: float = 2.0
    """Penalty of an excess as large as the baseline's peak, in steps, for first plans."""
    first_plan_share: float = 0.3
    """Time limit of each first plan, as a share of the time limit."""


@dataclass(frozen=True)
class NeighborhoodSettings:
    """Large-neighbourhood search (:mod:`autoremat.planner.exact.large_neighborhood`)."""

    neighborhoods_per_second: int = 2
    """Number of neighbourhoods per second of the time limit."""
    neighborhood_seconds: float = 5.0
    """Time limit of a neighbourhood in seconds. On a machine of ordinary speed, the limit on nodes ends it earlier."""
    nodes: int = 30
    """Maximum number of branch-and-bound nodes of one neighbourhood."""
    whole_model_columns: int = 1500
    """Number of columns up to which the whole model is one neighbourhood."""
    whole_model_nodes: int = 2000
    """Maximum number of branch-and-bound nodes of a whole model."""
    initial_columns: int = 1500
    """Number of columns that the first neighbourhoods free. It falls after an unsolved neighbourhood and rises after a solved
    one."""
    minimum_columns: int = 100
    """Minimum number of columns that a neighbourhood frees."""
    maximum_columns: int = 3000
    """Maximum number of columns that a neighbourhood frees."""
    growth: float = 1.2
    """Factor of the columns after a solved neighbourhood."""
    shrinkage: float = 0.6
    """Factor of the columns after an unsolved one."""
    program_gap: float = 1e-3
    """Relative gap at which the program of a neighbourhood counts as solved."""
    over_budget_probability: float = 0.7
    """Probability that a stretch of ops lies around an op over the budget."""
    disagreement: float = 0.05
    """Difference of a column between plan and relaxation from which the two disagree."""
    disagreement_probability: float = 0.6
    """Probability that columns on which the two disagree join a neighbourhood."""
    allowance_probability: float = 0.5
    """Probability that a neighbourhood may use the bytes that the model counts and the simulator does not."""
    penalty: float = 4.0
    """First penalty of an excess as large as the baseline's peak, in steps."""
    penalty_when_fitting: float = 8.0
    """First penalty if the first plan fits, in steps. It is higher, to keep the search near plans that fit."""
    maximum_penalty: float = 64.0
    """Highest penalty, in steps. Small models and relaxations use it from the beginning."""
    minimum_gain: float = 1e-5
    """Least improvement that counts, as a share of the step."""
    patience: int = 30
    """Number of neighbourhoods in a row without improvement that end the search, if the plan fits."""
    patience_when_over_budget: int = 6
    """Number of neighbourhoods in a row without improvement after which the penalty doubles, if the plan does not fit."""
