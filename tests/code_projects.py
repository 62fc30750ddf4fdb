"""A user's project for tests: two modules, a data file, and requirements that name a package of its own wheel."""

import json
import zipfile
from pathlib import Path

TRAIN = """
import json, os, sys, time
from pathlib import Path

import tinygreet  # of the environment only
import torch
from lib.model import make_model

from ebbflow import ElasticRun

data = torch.tensor(json.loads(Path("data.json").read_text()), dtype=torch.float32).view(-1, 1)
print("runs", tinygreet.hello(), os.environ.get("COLOR"), sys.prefix, os.getcwd(), flush=True)
with ElasticRun.start(seed=1) as run:
    model, _ = run.prepare(make_model(), lambda p: torch.optim.SGD(p, lr=0.1), batch_size=8)
    for _ in run.epochs(int(sys.argv[1])):
        for inputs, wanted in run.batches((data, 2 * data)):
            late = len(sys.argv) > 2 and run.progress.step >= 40 and not Path(sys.argv[2]).exists()
            time.sleep(1.0 if late else 0.02)  # slow until the file of this name is there
            run.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
            run.step()
        run.report(slope=float(next(model.parameters()).detach()))
"""


def write_wheel(folder: Path, name: str = "tinygreet") -> Path:
    """Write a wheel of one module whose ``hello`` returns ``hello``, and return its path."""
    info = f"{name}-1.0.dist-info"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "def hello():\n    return 'hello'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return path


def write_project(folder: Path) -> Path:
    """Write the project into ``folder / "project"`` and return that; it trains y = 2 x, for epochs as asked."""
    project = folder / "project"
    (project / "lib").mkdir(parents=True)
    (project / "train.py").write_text(TRAIN)
    (project / "lib" / "__init__.py").write_text("")
    (project / "lib" / "model.py").write_text(
        "import torch\n\n\ndef make_model():\n    return torch.nn.Linear(1, 1)\n"
    )
    (project / "data.json").write_text(json.dumps([n / 32 for n in range(32)]))
    wheel = write_wheel(project)
    (project / "requirements.txt").write_text(f"# a package of our own\n./{wheel.name}\n")
    return project
