"""One job at a time on a thread of its own, so that training waits for a copy and not for a disk."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ebbflow.infra.errors import StorageError

Result = TypeVar("Result")


class BackgroundWriter(Generic[Result]):
    """Runs one job in the background. Its result or error is given out once, by the next ``wait``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._result: Result | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check_idle(self) -> None:
        """Raise ``StorageError`` while a job runs; before anything is changed that it may use."""
        if self.busy:
            raise StorageError(f"{self._name} is still writing")

    def start(self, job: Callable[[], Result]) -> None:
        """Begin ``job``. Raises ``StorageError`` while one runs, and what the last one raised, once."""
        self.check_idle()
        self._raise()
        self._result = None

        def run() -> None:
            try:
                self._result = job()
            except Exception as exc:
                self._error = exc

        # a daemon: a disk that hangs must not keep the process from ending
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Return when no job runs, or after ``timeout`` seconds; what came of it is left for ``wait``."""
        if self._thread is not None:
            self._thread.join(timeout)

    def wait(self, timeout: float) -> Result | None:
        """Return the result of the last job, ``None`` if there was none or it was given out already.

        Raises the job's own error, or ``StorageError`` if it takes longer than ``timeout`` seconds.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise StorageError(f"{self._name} did not finish within {timeout:g} s")
            self._thread = None
        self._raise()
        result, self._result = self._result, None
        return result

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
