"""A report as one self-contained HTML file: it needs no network and no other files."""

from __future__ import annotations

import re
from typing import Any

from autoremat.basics.units import format_bytes, format_seconds
from autoremat.report import plots, text_tables
from autoremat.report.data import ReportData
from autoremat.report.decisions import Decision, op_name
from autoremat.report.peak_snapshot import PeakSnapshot


def to_html(report: ReportData) -> str:
    """Returns the text of the file. Raises ``ImportError`` without matplotlib, of the extra ``plot``."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autoremat.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    filters = {"bytes": format_bytes, "seconds": format_seconds, "place": text_tables.place, "op": op_name,
               "line": text_tables.short_source, "breakable": _breakable}  # fmt: skip
    environment.filters.update(filters)
    graphs: list[ReportData] = [report, *report.others]
    return environment.get_template("report.html").render(graphs=[_graph(one) for one in graphs], decisions=list(Decision))


def _breakable(path: str) -> Any:
    """Returns a module or file path as markup in which a line may break after each dot and slash."""
    import markupsafe

    return markupsafe.Markup(re.sub("([./])", r"\1<wbr>", str(markupsafe.escape(path))))


def _graph(report: ReportData) -> dict[str, Any]:
    drawn = {}
    if report.profile_after is not None:
        drawn["Memory over the step"] = plots.as_svg(plots.memory(report))
    if report.values:
        drawn["What becomes of the forward's values, by layer"] = plots.as_svg(plots.saved_by_layer(report))
    moments: dict[str, PeakSnapshot] = {}
    if report.peak_after is not None:
        moments["Where memory is fullest"] = report.peak_after
    if report.peak_before is not None:
        moments["Where it would be without recomputation"] = report.peak_before
    return {
        "brief": list(text_tables.brief(report)),
        "figures": text_tables.figures(report),
        "pictures": drawn,
        "moments": moments,
        "totals": {by: report.totals(by) for by in ("module", "op")},
        "has_other_forms": report.stored is not None,
        "values": sorted(report.values, key=lambda value: -value.bytes),
    }
