"""How many rows and bytes a set of joined relations has.

Every estimate is a function of the *set* of relations, never of the order in which they are joined, so that
all plans over one set agree about it (a stage's checkpoint is the same whichever plan wrote it).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import isnan, prod

from sqlglot import exp

from ebbflow.planners.model import ColumnStatistics
from ebbflow.planners.query.estimates.overlap import Keys, Overlaps
from ebbflow.planners.query.estimates.ranges import (
    WHOLE,
    KeyRange,
    common_range,
    key_ranges,
    measurable,
    within_text,
)
from ebbflow.planners.query.estimates.relations import LocalEstimates, RelationInput, conjunction_text
from ebbflow.planners.query.estimates.selectivity import selectivity
from ebbflow.planners.query.sql.joingraph import Column, JoinGraph, Predicate

NOISE = 1.2  # distinct counts are approximate: a reference may seem to have this many times its key's values
ROW_BYTES = 8.0  # per row in memory, besides its fields
_MOST_ROWS = 1e30  # an estimate beyond any table, whose products are still numbers
_LEAST = 1e-9  # fraction of rows inside a range: statistics may be a little off


class Cardinalities:
    """Rows, widths and bytes of every set of relations of one join graph.

    Joins: ``Π rows / Π over equality classes of all but the smallest ndv`` (System R, generalised to
    classes). ndv counts values that a column's own predicates leave. Predicates on *other* columns do not
    reduce it: the expected size of a join of independently filtered inputs is the product of the fractions,
    and a smaller divisor would count the filter twice. So a reference to a key keeps ``|references| ·
    |key'|/|key|`` rows. Of columns with different ranges, rows and ndv are those inside the common range. Two or
    more equalities between the same two relations are one composite key: together they divide by no more than the
    rows of the smaller side.

    Actual row counts are exact for their own set. A superset is scaled by actual/estimate of the largest
    known sets inside it, and by how often their keys meet in samples of them (``Overlaps``).
    """

    def __init__(
        self,
        graph: JoinGraph,
        inputs: Sequence[RelationInput],
        *,
        selectivities: Mapping[str, float] | None = None,
        actuals: Mapping[int, float] | None = None,
        samples: Mapping[int, Keys] | None = None,
        outputs: Iterable[Column] | None = None,
    ) -> None:
        """``inputs`` follow ``graph.relations``. ``selectivities`` are measured fractions by predicate text,
        or by :func:`conjunction_text` for all local predicates of a relation together; the latter wins.
        ``actuals`` are known row counts by bit set, ``samples`` their keys. ``outputs`` are the columns needed above
        the joins (all used columns if not given); the others are dropped once no open predicate needs them."""
        if len(inputs) != len(graph.relations):
            raise ValueError(f"inputs must follow the {len(graph.relations)} relations; got {len(inputs)}")
        self.graph = graph
        self.inputs = tuple(inputs)
        self._measured = dict(selectivities or {})
        self.local = LocalEstimates(graph, self.inputs, self._measured)
        self._ranges = key_ranges(graph, self.local.statistics)
        self._classes = tuple(self._class_values(i) for i in range(len(graph.classes)))
        self._inside = tuple(self._inside_range(i) for i in range(len(graph.classes)))
        self._composites = self._composite_factors()
        self._joins = self._join_fractions()
        self._widths = self._width_groups(outputs)
        self._raw: dict[int, float] = {}
        self._divisors: dict[tuple[int, int], float] = {}
        self._rows: dict[int, float] = {}
        self._width: dict[int, float] = {}
        self._actuals = {m: max(r, 0.0) for m, r in (actuals or {}).items() if m > 0}
        self._overlaps = Overlaps(samples or {})
        # Larger sets first: they know the most. Then by bit set, to be deterministic.
        self._known = sorted(self._actuals, key=lambda m: (-m.bit_count(), m))

    def base_rows(self, i: int) -> float:
        """Return the rows of relation ``i`` before its local predicates."""
        return self.inputs[i].rows

    def filtered_rows(self, i: int) -> float:
        """Return the rows of relation ``i`` after its local predicates."""
        return self.rows(1 << i)

    def rows(self, mask: int) -> float:
        """Return the rows of the joined relations ``mask``: at least 1, unless known to be none."""
        found = self._rows.get(mask)
        if found is None:
            found = self._actuals.get(mask)
            if found is None:
                guess = self._estimate(mask) * self._correction(mask)
                # products over very many relations overflow, or become no number at all
                found = _MOST_ROWS if isnan(guess) else min(max(guess, 1.0), _MOST_ROWS)
            self._rows[mask] = found
        return found

    def width(self, mask: int, columns: Iterable[Column] | None = None) -> float:
        """Return the average bytes in memory of one row: of ``columns``, or of those still needed above
        ``mask``."""
        if columns is not None:
            return ROW_BYTES + sum(self.statistics(c).width for c in columns)
        found = self._width.get(mask)
        if found is None:
            found = ROW_BYTES
            for relation, users, width in self._widths:
                if relation & mask and users & ~mask:
                    found += width
            self._width[mask] = found
        return found

    def bytes(self, mask: int, columns: Iterable[Column] | None = None) -> float:
        """Return the bytes in memory of the joined relations ``mask``."""
        return self.rows(mask) * self.width(mask, columns)

    def scanned_bytes(self, i: int) -> float:
        """Return the stored bytes of the columns of relation ``i`` that the query uses."""
        given = self.inputs[i]
        total = sum(s.width for s in given.columns.values())
        used = sum(
            given.columns[name].width for name in self.graph.relations[i].columns if name in given.columns
        )
        return given.bytes_stored * (used / total if total > 0.0 else 1.0)

    def statistics(self, column: Column) -> ColumnStatistics:
        """Return a column's statistics before any predicate, the missing ones filled in."""
        return self.local.statistics(column)

    def distinct(self, mask: int, columns: Iterable[Column]) -> float:
        """Return the expected number of distinct combinations of ``columns`` among the rows of ``mask``: what
        a GROUP BY gives."""
        names: dict[int, list[str]] = {}
        for alias, name in sorted(set(columns)):
            names.setdefault(self.graph.index[alias], []).append(name)
        product = 1.0
        for i, own in names.items():
            product *= self.local.distinct(i, own)
        return max(min(product, self.rows(mask)), 1.0)

    def has_equality(self, left: int, right: int) -> bool:
        """Tell whether some equality joins ``left`` with ``right``, so that a hash or merge join can run."""
        for mask in self.graph.class_masks:
            if mask & left and mask & right:
                return True
        for one, other in self._equations:
            inside = one | other
            if inside & ~(left | right):
                continue
            if (not one & ~left and not other & ~right) or (not one & ~right and not other & ~left):
                return True
        return False

    def key_bytes(self, left: int, right: int) -> float:
        """Return the average bytes of the key by which ``left`` is joined with ``right``: of the columns that are
        equal between them. Expressions count as one column of eight bytes each."""
        total, both = 0.0, left | right
        for mask, least, widths in self._key_widths:
            if mask & left and mask & right:
                total += least if not mask & ~both else min(width for bit, width in widths if bit & both)
        for one, other in self._equations:
            if (not one & ~left and not other & ~right) or (not one & ~right and not other & ~left):
                total += 8.0
        return total

    # Joins

    @cached_property
    def _key_widths(self) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """Return of each class its relations, as bits, the least width of its columns, and those of each relation."""
        index, found = self.graph.index, []
        for mask, equal in zip(self.graph.class_masks, self.graph.classes, strict=True):
            widths = [(1 << index[c[0]], self.statistics(c).width) for c in equal.columns]
            found.append((mask, min(width for _, width in widths), widths))
        return found

    def _class_values(self, index: int) -> tuple[tuple[int, float], ...]:
        """Return, per relation of a class, its bit and the distinct values its own predicates leave."""
        columns = self.graph.classes[index].columns
        keys = [self.inputs[self.graph.index[c[0]]].rows for c in columns if self.local.is_key(c)]
        values: dict[int, float] = {}
        for column in columns:
            i = self.graph.index[column[0]]
            ndv = self.local.ndv(column)
            if self.local.is_key(column):
                ndv = self.inputs[i].rows
            else:
                # A reference cannot have more values than the key it refers to; counts are approximate.
                ndv = min([ndv, *(k for k in keys if k < ndv <= NOISE * k)])
            ndv = max(ndv * self.local.kept(column), 1.0)
            values[i] = min(values.get(i, ndv), ndv)
        return tuple((1 << i, ndv) for i, ndv in sorted(values.items()))

    def _inside_range(self, index: int) -> dict[int, tuple[float, float]]:
        """Return the relations of a class, as bits, that reach beyond its common range: with the fractions inside of
        their values, and of the rows that their predicates leave."""
        found = self._ranges[index]
        if found is None:
            return {}
        values = dict(self._classes[index])
        names = {1 << self.graph.index[alias]: name for alias, name in self.graph.classes[index].columns}
        shares = {b: found.share(self.local.statistics(self._column(b, name))) for b, name in names.items()}
        inside = {b: values[b] * share for b, share in shares.items()}
        out: dict[int, tuple[float, float]] = {}
        for bit, name in names.items():
            # A lone value far off must not empty the range: whoever has more values inside has those of the others.
            least = max((min(n, values[bit]) for b, n in inside.items() if b != bit), default=0.0)
            share = max(inside[bit], least) / values[bit]
            if share < WHOLE:
                out[bit] = (share, self._rows_inside(bit, name, found, share))
        return out

    def _rows_inside(self, bit: int, name: str, found: KeyRange, share: float) -> float:
        """Return what fraction of a relation's rows, after its predicates, is inside a range of column ``name``."""
        local = measurable(self.graph.local(bit.bit_length() - 1))
        alone = self._measured.get(conjunction_text(local)) if local else None
        both = self._measured.get(within_text(local, name, found)) if local else None
        return share if both is None or not alone else min(both / alone, 1.0)

    def _column(self, bit: int, name: str) -> Column:
        return (self.graph.relations[bit.bit_length() - 1].alias, name)

    def _composite_factors(self) -> tuple[tuple[int, float, int], ...]:
        """Return (pair of relations, factor, group) for pairs joined by several classes, largest factor
        first.

        The factor undoes the part of the classes' product that exceeds the smaller side's rows. Pairs of one
        group share classes; of a group, only a spanning forest may be applied to a set.
        """
        found = []
        n, group = len(self.inputs), list(range(len(self._classes)))
        for i in range(n):
            for j in range(i + 1, n):
                both = (1 << i) | (1 << j)
                shared = [k for k, c in enumerate(self._classes) if sum(b for b, _ in c if b & both) == both]
                if len(shared) < 2:
                    continue
                product, cap = 1.0, min(self.inputs[i].rows, self.inputs[j].rows)
                for k in shared:
                    product *= max(v for b, v in self._classes[k] if b & both)
                    cap *= self._kept_of_class(k, both)
                factor = product / max(min(product, cap), 1.0)
                if factor > 1.0:
                    first = group[shared[0]]
                    merged = {group[k] for k in shared}
                    group = [first if g in merged else g for g in group]
                    found.append((both, factor, shared[0]))
        found.sort(key=lambda item: (-item[1], item[0]))
        return tuple((both, factor, group[k]) for both, factor, k in found)

    def _kept_of_class(self, index: int, relations: int) -> float:
        columns = (c for c in self.graph.classes[index].columns if relations >> self.graph.index[c[0]] & 1)
        return min([1.0, *map(self.local.kept, columns)])

    def _join_fractions(self) -> tuple[tuple[int, float], ...]:
        """Return (relations, fraction) of predicates over several relations that are not class equalities."""
        joined = [p for p in self.graph.predicates if p.relations & (p.relations - 1) and not p.implied]
        parts = [p for p in self.graph.predicates if p.implied]
        self._equations = tuple(pair for p in joined if (pair := self._equation(p)) is not None)
        out = []
        for predicate in joined:
            fraction = self._measured.get(predicate.text)
            if fraction is None:
                fraction = selectivity(predicate.expression, self.statistics)
                # What it implies of single relations has been applied there already.
                for part in parts:
                    if part.columns <= predicate.columns and not part.relations & ~predicate.relations:
                        fraction /= max(self.local.together([part]), fraction, 1e-12)
            out.append((predicate.relations, min(max(fraction, 0.0), 1.0)))
        return tuple(out)

    def _equation(self, predicate: Predicate) -> tuple[int, int] | None:
        """Return the relations of both sides of an equality between expressions, if they are disjoint."""
        node = predicate.expression.unnest()
        if predicate.subquery or not isinstance(node, exp.EQ | exp.NullSafeEQ):
            return None
        sides = [
            sum({1 << self.graph.index[column.table] for column in side.find_all(exp.Column)})
            for side in (node.this, node.expression)
        ]
        return None if not sides[0] or not sides[1] or sides[0] & sides[1] else (sides[0], sides[1])

    def _estimate(self, mask: int) -> float:
        found = self._raw.get(mask)
        if found is not None:
            return found
        low = mask & -mask
        rest = mask ^ low
        result = self.local.rows(low.bit_length() - 1)
        if rest:
            result = self._product(mask)
            for index, class_mask in enumerate(self.graph.class_masks):
                inside = class_mask & mask
                if inside & (inside - 1):
                    result /= self._divisor(index, inside)
            for relations, fraction in self._joins:
                if not relations & ~mask:
                    result *= fraction
            result = min(result * self._composite(mask), self._product(mask))
        self._raw[mask] = result
        return result

    def _product(self, mask: int) -> float:
        result = 1.0
        while mask:
            low = mask & -mask
            result *= self.local.rows(low.bit_length() - 1)
            mask ^= low
        return result

    def _divisor(self, index: int, inside: int) -> float:
        """Return the product of all but the smallest ndv of a class over the relations ``inside``, over the fraction
        of their rows inside the range that they have in common."""
        found = self._divisors.get((index, inside))
        if found is None:
            reach = self._inside[index] if self._bounded(index, inside) else {}
            own = [(v, *reach.get(b, (1.0, 1.0))) for b, v in self._classes[index] if b & inside]
            values = sorted(max(v * part, 1.0) if part < 1.0 else v for v, part, _ in own)
            found = prod(values[1:])
            for _, _, rows in own:
                found /= max(rows, _LEAST)
            self._divisors[index, inside] = found
        return found

    def _bounded(self, index: int, inside: int) -> bool:
        """Tell whether the relations ``inside`` alone make the common range of a class."""
        found = self._ranges[index]
        if found is None:
            return False
        columns = [c for c in self.graph.classes[index].columns if inside >> self.graph.index[c[0]] & 1]
        return common_range(map(self.local.statistics, columns)) == found

    def _composite(self, mask: int) -> float:
        pairs = [c for c in self._composites if not c[0] & ~mask]
        if len(pairs) < 2:
            return pairs[0][1] if pairs else 1.0
        result = 1.0
        trees: list[tuple[int, int]] = []  # (group, connected relations)
        for both, factor, group in pairs:
            if any(g == group and not both & ~t for g, t in trees):
                continue
            touching = [t for t in trees if t[0] == group and t[1] & both]
            merged = both
            for item in touching:
                merged |= item[1]
                trees.remove(item)
            trees.append((group, merged))
            result *= factor
        return result

    # Actual row counts

    def _correction(self, mask: int) -> float:
        """Return how far the known sets inside ``mask`` are from their estimates.

        Disjoint known sets multiply. Overlapping ones do where their intersection is known too, and divide by
        its ratio (as conditional probabilities do); otherwise the smaller one is left out.
        """
        ratio, covered, apart = 1.0, 0, []
        for known in self._known:
            if known & ~mask or not known & ~covered:
                continue
            overlap = known & covered
            if overlap and (overlap not in self._actuals or self._actuals[overlap] <= 0.0):
                continue
            ratio *= self._ratio(known) / (self._ratio(overlap) if overlap else 1.0)
            covered |= known
            apart += [] if overlap else [known]
        return ratio * self._overlaps.correction(apart, self.graph.class_masks, self._divisor)

    def _ratio(self, known: int) -> float:
        return self._actuals[known] / max(self._estimate(known), 1e-9)

    # Widths

    def _width_groups(self, outputs: Iterable[Column] | None) -> tuple[tuple[int, int, float], ...]:
        """Return (relation, users, width): columns of that width are needed while a user is outside the
        set."""
        always = 1 << len(self.inputs)  # a bit outside every set
        wanted = None if outputs is None else set(outputs)
        users: dict[Column, int] = {}
        for predicate in self.graph.predicates:
            if not predicate.implied:
                for column in predicate.columns:
                    users[column] = users.get(column, 0) | predicate.relations
        for cls, mask in zip(self.graph.classes, self.graph.class_masks, strict=True):
            for column in cls.columns:
                users[column] = users.get(column, 0) | mask
        groups: dict[tuple[int, int], float] = {}
        for i, ref in enumerate(self.graph.relations):
            for name in sorted(ref.columns):
                column = (ref.alias, name)
                used = always if wanted is None or column in wanted else users.get(column, 0)
                key = (1 << i, used)
                groups[key] = groups.get(key, 0.0) + self.statistics(column).width
        return tuple((relation, used, width) for (relation, used), width in groups.items())
