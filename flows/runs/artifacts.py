"""Artifacts of flow runs: Prefect is told of them, and nothing waits for its API or fails by it."""

import logging
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

import httpx
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from ebbflow.tasks.drawing.svg import data_url

Rows = Sequence[dict[str, Any]]

log = logging.getLogger(__name__)


def table(key: str, rows: Rows, description: str) -> None:
    """Publish a table as an artifact of the present run; where Prefect does not answer, the run's log says so."""
    _told(key, lambda: create_table_artifact(key=key, table=list(rows), description=description))


def picture(key: str, svg: str, name: str, description: str) -> None:
    """Publish a picture as an artifact of the present run; see ``table``."""
    shown = f"![{name}]({data_url(svg)})"
    _told(key, lambda: create_markdown_artifact(key=key, markdown=shown, description=description))


def _told(key: str, create: Callable[[], object]) -> None:
    try:
        create()
    except (httpx.HTTPError, PrefectException, OSError, RuntimeError) as error:
        get_run_logger().warning("the artifact %s was not published: %s", key, error)


class Publisher:
    """Publishes tables while a run lasts, in a thread of its own: an API that hangs holds nobody up.

    Of the tables that wait, the newest of each key is kept.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, Callable[[], object]] = {}
        self._busy = False

    def table(self, key: str, rows: Rows, description: str) -> None:
        """Publish a table soon, as an artifact of the run of the calling thread; returns at once."""
        work = partial(copy_context().run, table, key, rows, description)
        with self._changed:
            self._waiting[key] = work
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._work, name="ebbflow-artifacts", daemon=True).start()

    def settle(self, seconds: float) -> bool:
        """Wait until all is published, so long at most, and tell whether it was; what has not begun is dropped."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._busy, seconds)
            self._waiting.clear()
        return done

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._busy = False
                    self._changed.notify_all()
                    return
                work = self._waiting.pop(next(iter(self._waiting)))
            try:
                work()
            except Exception:
                log.exception("an artifact was not published")
