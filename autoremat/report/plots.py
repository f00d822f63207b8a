"""Plots of reports and of Pareto fronts, by matplotlib (of the extra ``plot``).

Each function returns a ``matplotlib.figure.Figure``, which ``figure.savefig("memory.png")`` or ``.svg`` writes. The functions
display nothing and change no global state.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from autoremat.basics.display import short_source
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.plans.limits import undominated
from autoremat.report import text_tables
from autoremat.report.data import ReportData
from autoremat.report.decisions import Decision, op_name
from autoremat.report.peak_snapshot import GRADIENTS, module_group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, BOUND, POLICY, TORCH = "autoremat", "lower bound", "policy", "torch"
"""Families of points of time and memory."""

COLOURS = ("#4269d0", "#efb118", "#6cc5b0", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#3ca951", "#b3b3b3", "#d9d9d9")
"""Colours of the bands of a stack, distinguishable for most people with colour blindness."""

GRADIENT_COLOUR, BUDGET_COLOUR, BEFORE_COLOUR, HOST_COLOUR = "#505050", "#d62728", "#808080", "#2ca02c"

FATE_COLOURS = {
    Decision.SAVED: "#4269d0",
    Decision.OFFLOADED: "#a463f2",
    Decision.PACKED: "#97bbf5",
    Decision.SHARDED: "#6cc5b0",
    Decision.RECOMPUTED: "#efb118",
    Decision.POSTPONED: "#ff8ab7",
    Decision.FUSED: "#d9d9d9",
    Decision.FORWARD_ONLY: "#f2f2f2",
}

WIDTH, HEIGHT = 9.0, 4.5

PLACES = [(x, y, side) for y in (3, -9, 12, -18, 21) for x, side in ((5, "left"), (-5, "right"), (0, "center"))]
"""Places of a label beside its point, in points of the page, the best first."""


def memory(report: ReportData) -> Figure:
    """Returns a plot of the live bytes over one step with the plan, stacked by groups of modules.

    Lines show the budget, the step without recomputation, and plain Inductor's peak and time. The time is that of the cost
    model. Raises ``ValueError`` for an empty graph.
    """
    after, before = report.profile_after, report.profile_before
    if after is None:
        raise ValueError("the graph is empty")
    figure, axes = _empty(WIDTH, HEIGHT)
    unit, scale = _byte_unit([*after.totals, *(before.totals if before else ())])
    shown_unit = format_seconds(max([*after.seconds, *(before.seconds if before else ())], default=0.0)).split()[1]
    time_unit, time_scale = {"us": ("microseconds", 1e-6), "ms": ("milliseconds", 1e-3), "s": ("seconds", 1.0)}[shown_unit]
    seconds = [second / time_scale for second in after.seconds]
    palette = iter(COLOURS)
    shades = [GRADIENT_COLOUR if group == GRADIENTS else next(palette) for group in after.groups]
    bands = sorted(zip(after.groups, shades, after.bytes, strict=True), key=lambda band: band[0] != GRADIENTS)
    groups, colours, sizes = zip(*bands, strict=True)  # gradients, which only grow, at the bottom
    heights = [[size / scale for size in band] for band in sizes]
    axes.stackplot(seconds, heights, labels=groups, colors=colours, step="post", linewidth=0)
    if before is not None:
        totals = [total / scale for total in before.totals]
        label = f"without recomputation, {format_bytes(max(before.totals, default=0))}"
        axes.step([s / time_scale for s in before.seconds], totals, where="post", color=BEFORE_COLOUR, lw=1, label=label)
    name, plain = report.compared
    if plain != report.baseline_peak_bytes:
        _mark_plain(axes, report.step_seconds / time_scale, plain / scale, f"{name}, {format_bytes(plain)}")
    if report.budget_bytes is not None:
        label = f"budget, {format_bytes(report.budget_bytes)}"
        axes.axhline(report.budget_bytes / scale, color=BUDGET_COLOUR, ls="--", lw=1.2, label=label)
    if 0 < after.border < len(seconds):
        border = seconds[after.border]
        axes.axvline(border, color="black", lw=0.8)
        for text, side, way in (("forward", "right", -4), ("backward", "left", 4)):
            place = axes.get_xaxis_transform()
            axes.annotate(text, (border, 1.0), (way, 3), xycoords=place, textcoords="offset points", ha=side, fontsize=9)
    axes.set(xlabel=f"{time_unit} of the step, estimated", ylabel=f"{unit} live", ylim=(0, None), xlim=(0, None))
    title = f"peak {format_bytes(report.predicted_peak_bytes)}, time {report.added_share:+.1%}"
    axes.set_title(title, loc="left", fontsize=10, pad=16)
    if after.host:
        host_unit, host_scale = _byte_unit(after.host)
        on_host = axes.twinx()
        label = f"on the host, {format_bytes(max(after.host))} (right axis)"
        on_host.step(seconds, [held / host_scale for held in after.host], where="post", color=HOST_COLOUR, lw=1.2, label=label)
        on_host.set(ylabel=f"{host_unit} on the host", ylim=(0, None))
        on_host.spines["top"].set_visible(False)
        axes.plot([], [], color=HOST_COLOUR, lw=1.2, label=label)  # the legend is that of the left axis
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=((1.12 if after.host else 1.0), 1.0), frameon=False)
    return figure


def pareto(points: Sequence[Any]) -> Figure:
    """Returns a plot of recomputation against the peak for the points of ``autoremat.pareto``.

    Our plans and the lower bound are lines; the other families are single points. Dotted lines mark plain Inductor's. A label
    without room is left out.
    """
    figure, axes = _empty(WIDTH, HEIGHT)
    unit, scale = _byte_unit([point.peak_bytes for point in points])
    styles: dict[str, dict[str, Any]] = {
        OURS: {"color": "#4269d0", "marker": "o", "ls": "-", "zorder": 4},
        TORCH: {"color": "#efb118", "marker": "s", "ls": "", "zorder": 3},
        POLICY: {"color": "#9c6b4e", "marker": "^", "ls": "", "zorder": 2},
        BOUND: {"color": "#808080", "marker": "", "ls": "-", "zorder": 1},
    }
    labels = dict[tuple[float, float], dict[str, str]]()
    for family, style in styles.items():
        shown = sorted((point for point in points if point.family == family), key=lambda point: point.peak_bytes)
        if not shown:
            continue
        if family in (OURS, BOUND):
            shown = undominated(shown, lambda point: (point.peak_bytes, point.added_seconds))
        peaks, costs = [p.peak_bytes / scale for p in shown], [100 * p.overhead for p in shown]
        label = "torch, activation_memory_budget" if family == TORCH else family
        axes.plot(peaks, costs, ms=5, lw=1.2, label=label, **style)
        if family == BOUND:
            axes.fill_between(peaks, costs, 0, color="#808080", alpha=0.15, lw=0)
        if family in (TORCH, POLICY):
            for point, peak, cost in zip(shown, peaks, costs, strict=True):
                labels.setdefault((peak, cost), {})[point.label] = style["color"]
    axes.set_xlim(axes.get_xlim())
    for plain in (point for point in points if (point.family, point.label) == (TORCH, "1")):
        place, label = (plain.peak_bytes / scale, 100 * plain.overhead), f"plain Inductor, {format_bytes(plain.peak_bytes)}"
        _mark_plain(axes, *place, f"{label}, {plain.overhead:+.1%}")
        labels = {place: {"plain Inductor": "black"}} | {other: names for other, names in labels.items() if other != place}
    axes.set(xlabel=f"peak of the step, {unit}", ylabel="recomputation, % of the step", ylim=(0, None))
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    _annotate(figure, {place: (", ".join(names), next(iter(names.values()))) for place, names in labels.items()})
    return figure


def _mark_plain(axes: Axes, right: float, top: float, label: str) -> None:
    axes.plot([0, right, right], [top, top, 0], color="black", ls=":", lw=1, label=label)


def _annotate(figure: Figure, labels: dict[tuple[float, float], tuple[str, str]]) -> None:
    """Writes the labels beside their points, within the axes, where no marker or other label is."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # the layout is known then
    (axes,), taken = figure.axes, []
    for line in (line for line in axes.lines if line.get_marker() not in ("", "None")):
        taken += [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in axes.transData.transform(line.get_xydata())]
    for point, (text, colour) in labels.items():
        note = axes.annotate(text, point, (0, 0), textcoords="offset points", fontsize=7, color=colour, in_layout=False)
        for x, y, side in PLACES:
            note.set(position=(x, y), ha=side)
            box = note.get_window_extent()
            if all(axes.bbox.contains(*corner) for corner in (box.min, box.max)) and not box.count_overlaps(taken):
                taken.append(box)
                break
        else:
            note.remove()


def saved_by_layer(report: ReportData) -> Figure:
    """Returns a plot of the forward's bytes by layer and decision, in the forward's sequence."""
    layers = dict[str, Counter[Decision]]()
    for value in report.values:
        parts = value.module.split(".")  # a layer is the path up to the first number
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        name = module_group(value.module) if number is None else ".".join(parts[: number + 1])
        layers.setdefault(name, Counter())[value.decision] += value.bytes
    layers = {name: sizes for name, sizes in layers.items() if any(sizes.values())}
    figure, axes = _empty(WIDTH, max(1.5, 0.9 + 0.18 * len(layers)))
    unit, scale = _byte_unit([sum(sizes.values()) for sizes in layers.values()])
    names, left = list(layers), [0.0] * len(layers)
    for decision, colour in FATE_COLOURS.items():
        sizes = [layers[name][decision] / scale for name in names]
        if any(sizes):
            axes.barh(names, sizes, left=left, color=colour, label=decision.value, height=0.85)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(y=0.01)
    axes.set(xlabel=f"{unit} made by the forward")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def as_svg(figure: Figure) -> str:
    """Returns the figure as an ``<svg>`` element in which text stays text."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "autoremat"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _empty(width: float, height: float) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _byte_unit(sizes: Iterable[int]) -> tuple[str, float]:
    """Returns the unit in which the largest of ``sizes`` is written, and the bytes of that unit."""
    most = max(sizes, default=0)
    unit = format_bytes(most).split()[1]
    return unit, float({"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit])


# -- a report as one HTML file, which needs no network and no other files --------------------------------------------------


def to_html(report: ReportData) -> str:
    """Returns the text of the file. Raises ``ImportError`` without matplotlib, of the extra ``plot``."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autoremat.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters.update(bytes=format_bytes, seconds=format_seconds, place=text_tables.place, op=op_name)
    environment.filters["line"] = short_source
    graphs: list[ReportData] = [report, *report.others]
    return environment.get_template("report.html").render(graphs=[_graph(one) for one in graphs], decisions=list(Decision))


def _graph(report: ReportData) -> dict[str, Any]:
    drawn = {}
    if report.profile_after is not None:
        drawn["Memory over the step"] = as_svg(memory(report))
    if report.values:
        drawn["What becomes of the forward's values, by layer"] = as_svg(saved_by_layer(report))
    moments = {"Where memory is fullest": report.peak_after, "Where it would be without recomputation": report.peak_before}
    return {
        "brief": list(text_tables.brief(report)),
        "figures": text_tables.figures(report),
        "pictures": drawn,
        "moments": {title: moment for title, moment in moments.items() if moment is not None},
        "totals": {by: report.totals(by) for by in ("module", "op")},
        "has_other_forms": bool(report.plan.schedule.stays),
        "values": sorted(report.values, key=lambda value: -value.bytes),
    }
