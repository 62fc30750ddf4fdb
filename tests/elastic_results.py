"""What an elastic job must come to, computed with nothing of its runtime."""

from typing import Any

from ebbflow.infra.elastic.application import Application, Key, Value
from ebbflow.infra.elastic.wire.cache import UpdateLog
from ebbflow.infra.elastic.worker.worker import Context


def undisturbed(app: Application, iterations: int) -> dict[Key, Value]:
    """Return the parameters after a bulk-synchronous run of an application whose tasks read once."""
    values = dict(app.parameters())
    executors = [app.executor(index) for index in range(app.executors)]
    for executor in executors:
        executor.load_input()
    for iteration in range(iterations):
        log = UpdateLog(app.combine, isolated=False)
        for executor in executors:
            task: Any = executor.run(Context(log, 0), iteration)
            try:
                task.send([values[key] for key in task.send(None).keys])
            except StopIteration:
                continue
            raise AssertionError("the task reads more than once")
        values |= {key: values[key] + increment for (key, _), increment in log.take().items()}
    return values
