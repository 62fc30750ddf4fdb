"""How much of a query is planned: its inner-join blocks, and why any of them stays as written."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlglot import exp

from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.views.blocks import barrier_words, inner_relations


@dataclass(frozen=True, slots=True)
class BlockCoverage:
    """The relations that inner and cross joins connect in one SELECT, after views are merged into their readers."""

    view: str
    relations: int  # two or more
    planned: int  # of them; 0 when the whole SELECT stays as written
    reason: str = ""  # why any stays as written


def coverage(analysis: Analysis) -> tuple[BlockCoverage, ...]:
    """Return the blocks of every SELECT of the query, in conditions too, in the order of its views."""
    found = []
    for view in analysis.chain.views:
        blocks = {id(b.select): b for b in (analysis.blocks[key] for key in analysis.blocks_of(view.name))}
        arms = {id(select) for select in view.selects()}
        for select in view.query.find_all(exp.Select):
            relations, block = inner_relations(select), blocks.get(id(select))
            if relations < 2:
                continue
            planned = len(block.graph.relations) if block is not None else 0
            if planned == relations:
                reason = ""
            elif block is not None:
                reason = f"behind a {barrier_words(block.barriers)}, where no condition lets them go first"
            elif view.opaque:
                reason = next((n for n in analysis.notes if "runs whole" in n), "the query runs whole")
            elif id(select) not in arms:
                reason = "in a subquery of a condition that depends on the outer query"
            else:
                told = [
                    n.removeprefix(f"{view.name}: ") for n in analysis.notes if n.startswith(f"{view.name}: ")
                ]
                reason = told[0] if told else "not recognised"
            found.append(BlockCoverage(view.name, relations, planned, reason))
    return tuple(found)


def sentences(blocks: Sequence[BlockCoverage]) -> tuple[str, ...]:
    """Return what people should know of ``blocks``: how many joins are planned, and why others are not."""
    ordered = [b for b in blocks if b.planned]
    if not blocks:
        return ("no inner joins: nothing to reorder",)
    sizes = ", ".join(str(b.planned) for b in ordered)
    word = "block" if len(blocks) == 1 else "blocks"
    out = [
        f"{len(ordered)} of {len(blocks)} inner-join {word} planned"
        + (f" ({sizes} relations)" if sizes else "")
    ]
    out += [
        f"{b.view}: {b.relations - b.planned} of {b.relations} inner-joined relations stay as written: {b.reason}"
        for b in blocks
        if b.planned < b.relations
    ]
    return tuple(out)
