"""An elastic application of a user's own: two modules, which count numbers by cell."""

from pathlib import Path

FILES = {
    "counting/__init__.py": "",
    "counting/cells.py": '''"""Where a number belongs."""

import numpy as np


def cell_of(numbers, cells):
    return np.clip((numbers * cells).astype(int), 0, cells - 1)
''',
    "histogram.py": '''"""Counts numbers from 0 to 1 by cell, a few at a time."""

import numpy as np
from counting.cells import cell_of

from ebbflow import Application, Driver, Executor, open_arrays


class Histogram(Application):
    isolated = True

    def __init__(self, data, executors, iterations, cells):
        self.data, self.executors, self.iterations, self.cells = data, executors, iterations, cells

    def driver(self):
        return Rounds(self.iterations)

    def executor(self, index):
        return Part(self, index)

    def parameters(self):
        return {cell: 0 for cell in range(self.cells)}

    def objective(self, parameters):
        return -max(parameters.values())


class Rounds(Driver):
    """One round after the other, each on all executors."""

    def __init__(self, iterations):
        self.iterations, self.round, self.left = iterations, 0, 0

    def start(self, job):
        self.left = job.executors
        for executor in range(job.executors):
            job.dispatch(executor, self.round)

    def complete(self, job, completion):
        self.left -= 1
        if not self.left and self.round + 1 < self.iterations:
            self.round += 1
            self.start(job)

    def state_dict(self):
        return {"round": self.round, "left": self.left}

    def load_state_dict(self, state):
        self.round, self.left = state["round"], state["left"]


class Part(Executor):
    def __init__(self, application, index):
        self.application, self.index = application, index

    def load_input(self):
        with open_arrays(self.application.data) as arrays:
            self.numbers = arrays["x"][self.index :: self.application.executors]

    async def run(self, context, turn):
        app = self.application
        cells = cell_of(self.numbers[turn :: app.iterations], app.cells)
        for cell, count in zip(*np.unique(cells, return_counts=True)):
            context.update(int(cell), int(count))
''',
}


def write_application(folder: Path) -> None:
    """Write the files of the application."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
