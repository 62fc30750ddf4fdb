"""When a loss has stopped to improve: many jobs train longer than is of use (Jeon et al., ATC 2019, section 4.1)."""

from math import ceil, inf, isnan

from ebbflow.planners.errors import OptionError


class PlateauMonitor:
    """Advises to stop when the best loss has not improved over a while.

    Improved means by more than ``least`` of its size; a while is ``share`` of all epochs so far, ``patience`` at
    least. Only the owner of a job decides whether to follow the advice.
    """

    def __init__(self, patience: int = 5, share: float = 0.2, least: float = 0.001) -> None:
        """Raises ``OptionError`` for a patience below 1, a share outside [0, 1] and a negative ``least``."""
        if patience < 1 or not 0 <= share <= 1 or not least >= 0:
            raise OptionError(
                f"a plateau needs patience >= 1, share in [0, 1] and least >= 0; got {patience}, {share}, {least}"
            )
        self._patience, self._share, self._least = patience, share, least
        self._mark = inf  # the last loss that counted as better
        self._since = 0
        self.epochs = 0
        self.best = inf

    def add(self, loss: float) -> bool:
        """Take the loss of one more epoch and tell whether to stop. NaN counts as no improvement."""
        self.epochs += 1
        if not isnan(loss):
            self.best = min(self.best, loss)
            if self._mark == inf or loss < self._mark - self._least * abs(self._mark):
                self._mark, self._since = loss, self.epochs
        return self.stop

    @property
    def stop(self) -> bool:
        """Tell whether the advice is to stop."""
        return self.epochs - self._since >= self.window

    @property
    def window(self) -> int:
        """Return the epochs without improvement that are too many."""
        return max(self._patience, ceil(self._share * self.epochs - 1e-9))
