"""The picture of a plan: base tables and stages, each stage's output a checkpoint."""

from collections.abc import Hashable
from typing import Literal

from ebbflow.tasks.drawing.layers import Layout, arrange, longest_path
from ebbflow.tasks.drawing.svg import document, fit, tag, text, text_width, titled
from ebbflow.tasks.drawing.wording import bytes_text, count_text, plural, seconds_text
from ebbflow.tasks.query.report import PlanReport, PlanStageReport

_WIDE, _HIGH = 178.0, 50.0  # a stage's box
_TABLE = 22.0  # height of a table's pill
_MARGIN = 12.0
_MOST = 118.0  # width of a table's pill at most

Direction = Literal["right", "down"]


def dag_svg(plan: PlanReport, direction: Direction = "right") -> str:
    """Draw ``plan`` as a DAG, sources first, growing to the ``right`` or, for narrow pages, ``down``.

    A diamond on a stage's edge is its checkpoint: filled when it exists, hollow when it will be written.
    A table is drawn beside each stage that reads it.
    """
    stages = {s.fingerprint: s for s in plan.stages}
    edges: list[tuple[Hashable, Hashable]] = [
        (fp, s.fingerprint) for s in plan.stages for fp in s.inputs if fp in stages
    ]
    depth = longest_path(list(stages), [(str(a), str(b)) for a, b in edges])
    shift = 1 if any(s.tables and depth[s.fingerprint] == 0 for s in plan.stages) else 0
    layer: dict[Hashable, int] = {fp: d + shift for fp, d in depth.items()}
    for stage in plan.stages:
        for table in stage.tables:
            node = (stage.fingerprint, table)
            layer[node] = layer[stage.fingerprint] - 1
            edges.append((node, stage.fingerprint))
    down = direction == "down"
    sizes = {n: _across(n, down) for n in layer}
    layout = arrange(layer, sizes, edges, gap=16.0)
    return _picture(plan, stages, layout, down)


def _across(node: Hashable, down: bool) -> float:
    if isinstance(node, tuple):
        return _pill_width(str(node[1])) if down else _TABLE
    return _WIDE if down else _HIGH


def _pill_width(table: str) -> float:
    return min(_MOST, text_width(table, 11) + 20)


def _picture(plan: PlanReport, stages: dict[str, PlanStageReport], layout: Layout, down: bool) -> str:
    columns = [[n for n, at in layout.layer.items() if at == i] for i in range(layout.layers)]
    thick = [max((_along(n, down) for n in nodes), default=0.0) for nodes in columns]
    gap = 34.0 if down else 46.0
    starts = [_MARGIN + sum(thick[:i]) + gap * i for i in range(layout.layers)]
    length = (starts[-1] + thick[-1] if starts else _MARGIN) + _MARGIN + 8
    width, height = (layout.extent + 2 * _MARGIN, length) if down else (length, layout.extent + 2 * _MARGIN)

    def along(node: Hashable) -> tuple[float, float]:
        """Return where a node begins and ends along the flow; tables end close to their stage."""
        at = layout.layer[node]
        own = _along(node, down)
        if isinstance(node, tuple):
            return starts[at] + thick[at] - own, starts[at] + thick[at]
        return starts[at], starts[at] + own

    parts = []
    for (a, b), route in layout.routes.items():
        points = [(along(a)[1], route[0][1])]
        for at, centre in route[1:-1]:
            points += [(starts[at], centre), (starts[at] + thick[at], centre)]
        points.append((along(b)[0], route[-1][1]))
        parts.append(_edge([(x, c + _MARGIN) for x, c in points], down, dashed=isinstance(a, tuple)))
    for node in layout.layer:
        begin, _ = along(node)
        centre = layout.centre[node] + _MARGIN
        if isinstance(node, tuple):
            wide = _pill_width(str(node[1]))
            x, y = (centre - wide / 2, begin) if down else (begin, centre - _TABLE / 2)
            parts.append(_table(str(node[1]), x, y, wide))
        else:
            x, y = (centre - _WIDE / 2, begin) if down else (begin, centre - _HIGH / 2)
            parts.append(_stage(stages[str(node)], x, y, down))
    if not plan.stages:
        width, height = 200.0, 40.0
        parts.append(text(_MARGIN, 24.0, "no stages", class_="soft"))
    title = f"Plan {plan.id}: {plural(len(plan.stages), 'stage')}"
    width = max(width, 120.0)
    return document(width, height, title, plan.shape, parts, least=round(width * 0.62))


def _along(node: Hashable, down: bool) -> float:
    if isinstance(node, tuple):
        return _TABLE if down else _pill_width(str(node[1]))
    return _HIGH if down else _WIDE


def _edge(points: list[tuple[float, float]], down: bool, *, dashed: bool) -> str:
    def pair(along: float, across: float) -> str:
        return f"{across:.1f} {along:.1f}" if down else f"{along:.1f} {across:.1f}"

    (start, across), *rest = points
    path = f"M{pair(start, across)}"
    for end, other in rest:
        middle = (start + end) / 2
        path += f"C{pair(middle, across)} {pair(middle, other)} {pair(end, other)}"
        start, across = end, other
    return tag(
        "path",
        d=path,
        fill="none",
        stroke="var(--soft)",
        stroke_width=1.3,
        stroke_dasharray="3 3" if dashed else None,
    )


def _table(name: str, x: float, y: float, wide: float) -> str:
    return titled(
        f"table {name}",
        tag(
            "rect",
            x=x,
            y=y,
            width=wide,
            height=_TABLE,
            rx=_TABLE / 2,
            fill="var(--panel)",
            stroke="var(--line)",
        ),
        text(x + wide / 2, y + 15, fit(name, wide - 16, 11), text_anchor="middle", class_="small soft"),
    )


def _stage(stage: PlanStageReport, x: float, y: float, down: bool) -> str:
    colour = "var(--switch)" if stage.sink else "var(--edge)"
    figures = f"{seconds_text(stage.estimated_seconds)} · {count_text(stage.rows)} rows"
    parts = [
        tag(
            "rect",
            x=x,
            y=y,
            width=_WIDE,
            height=_HIGH,
            rx=6,
            fill="var(--panel)",
            stroke=colour,
            stroke_width=1.6,
        ),
        text(x + 10, y + 20, fit(stage.name, _WIDE - 20, 12), class_="bold"),
        text(x + 10, y + 38, figures, class_="small soft"),
    ]
    if stage.sink:
        parts.append(
            text(x + _WIDE - 9, y + 38, "result", text_anchor="end", class_="small", style=f"fill:{colour}")
        )
    else:
        px, py = (x + _WIDE / 2, y + _HIGH) if down else (x + _WIDE, y + _HIGH / 2)
        fill = "var(--edge)" if stage.checkpoint else "var(--bg)"
        diamond = f"{px - 6:.1f},{py:.1f} {px:.1f},{py - 6:.1f} {px + 6:.1f},{py:.1f} {px:.1f},{py + 6:.1f}"
        parts.append(tag("polygon", points=diamond, fill=fill, stroke="var(--edge)", stroke_width=1.6))
    return titled(_tooltip(stage), *parts)


def _tooltip(stage: PlanStageReport) -> str:
    lines = [
        stage.name,
        f"about {seconds_text(stage.estimated_seconds)}",
        f"{count_text(stage.rows)} rows, {bytes_text(stage.bytes)}",
    ]
    if not stage.sink:
        lines.append("its checkpoint exists" if stage.checkpoint else "its output becomes a checkpoint")
    return "\n".join([*lines, *([f"cut here: {stage.cut}"] if stage.cut else [])])
