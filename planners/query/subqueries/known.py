"""What a rewrite of a chain of views goes by."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.costs.cost import CostModel
from ebbflow.planners.query.costs.sizes import Sizes
from ebbflow.planners.query.plan.analysis import Analysis

Fractions = Mapping[str, Mapping[str, float]]  # measured, by "table alias" and predicate text


@dataclass(frozen=True)
class AnalyzedChain:
    """A chain taken apart, the tables that it reads, what an engine's work costs, and measured selectivities."""

    analysis: Analysis
    catalogue: Catalogue
    model: CostModel
    fractions: Fractions

    @cached_property
    def sizes(self) -> Sizes:
        """Return the estimated sizes of what the chain joins."""
        return Sizes(self.analysis, self.catalogue, self.fractions)
