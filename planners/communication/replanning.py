"""When a plan is searched again: waits above a share of the iteration, or another gang (section 4.4.4)."""

from dataclasses import dataclass

from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class ReplanRule:
    """When waiting for the planned order costs too much.

    Args:
        share: fraction of the iteration that a rank may wait (the thesis: 5 %).
        times: iterations one after another in which it must be more; the thesis says "consistently".
        warm_up: iterations after a change of plans that do not count.
        spacing: s between two searches.
    """

    share: float = 0.05
    times: int = 3
    warm_up: int = 2
    spacing: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise OptionError(f"share of a re-planning rule must be > 0 and < 1; got {self.share}")
        if self.times < 1 or self.warm_up < 0 or not self.spacing >= 0:
            raise OptionError(
                "times must be >= 1, warm_up and spacing >= 0; got "
                f"{self.times}, {self.warm_up}, {self.spacing:g} s"
            )


@dataclass
class ReplanWatch:
    """Counts waits of iterations, mean over ranks, against a rule."""

    rule: ReplanRule
    _since: int = 0  # iterations since the plan changed
    _above: int = 0  # one after another
    _searched: float | None = None  # s of the clock

    def changed(self) -> None:
        """Take note that another plan runs from now on."""
        self._since, self._above = 0, 0

    def observe(self, waited: float, iteration: float, now: float) -> str:
        """Return why a plan should be searched now; empty where none should.

        Args:
            waited: s that ranks waited in the iteration for motifs before theirs, mean over ranks.
            iteration: s that it took.
            now: s of the clock.
        """
        self._since += 1
        if self._since <= self.rule.warm_up or iteration <= 0:
            return ""
        share = waited / iteration
        self._above = self._above + 1 if share > self.rule.share else 0
        if self._above < self.rule.times:
            return ""
        if self._searched is not None and now - self._searched < self.rule.spacing:
            return ""
        self._searched, self._above = now, 0
        return (
            f"ranks waited {share:.0%} of an iteration for the planned order, {self.rule.times} times in a row "
            f"(limit {self.rule.share:.0%})"
        )
