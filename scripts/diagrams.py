"""Draw the diagrams of docs/concepts.md into docs/images: ``python scripts/diagrams.py``.

Each is a few boxes and arrows on a grid, as one SVG that follows the reader's light or dark colors by itself.
"""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal

IMAGES = Path(__file__).parent.parent / "docs" / "images"
Kind = Literal["plain", "main", "good", "bad", "store"]
Point = tuple[float, float]

_STYLE = """
.d{--bg:#fff;--ink:#1d2733;--soft:#5a6775;--line:#8894a1;--plain:#f6f8fa;--main:#c9dcec;--good:#cfeadf;--bad:#f8ddcd;
--store:#efe3f0;font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif;
font-size:13px}
@media (prefers-color-scheme:dark){.d{--bg:#151b22;--ink:#e4e9ee;--soft:#9aa7b4;--line:#77838f;--plain:#1c242d;
--main:#27455c;--good:#1d4a3d;--bad:#5a3420;--store:#44304a}}
.d text{fill:var(--ink);text-anchor:middle}
.d .label{fill:var(--soft);font-size:12px;stroke:var(--bg);stroke-width:5px;paint-order:stroke;stroke-linejoin:round}
.d .start{text-anchor:start}.d .end{text-anchor:end}.d .name{font-weight:600}
.d rect{stroke:var(--line)}.d .arrow{fill:none;stroke:var(--line);stroke-width:1.5}.d marker path{fill:var(--line)}
"""
_LINE = 16  # pixels between lines of text
_CHARACTER = 6.8  # pixels that a character takes at most, on average


@dataclass
class Diagram:
    """Boxes and arrows. Places are pixels from the upper left corner."""

    title: str
    says: str  # for readers who do not see it
    width: int
    height: int
    _shapes: list[str] = field(default_factory=list)
    _arrows: list[str] = field(default_factory=list)
    _labels: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, text: str, kind: Kind = "plain", height: float = 0
    ) -> None:
        """Draw a box around its lines; the first is its name. Raises ``ValueError`` for text that does not fit."""
        lines = text.split("\n")
        tall = height or 18 + _LINE * len(lines)
        for line in lines:
            if len(line) * _CHARACTER > width - 8:
                raise ValueError(f"{self.title}: {line!r} does not fit into {width} pixels")
        if x < 0 or y < 0 or x + width > self.width or y + tall > self.height:
            raise ValueError(f"{self.title}: the box {lines[0]!r} is outside")
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{tall:g}" rx="6" fill="var(--{kind})"/>'
        )
        first = y + (tall - _LINE * (len(lines) - 1)) / 2 + 4.5
        for number, line in enumerate(lines):
            name = ' class="name"' if number == 0 else ""
            self._shapes.append(
                f'<text x="{x + width / 2:g}" y="{first + number * _LINE:g}"{name}>{escape(line)}</text>'
            )

    def arrow(
        self, *points: Point, label: str = "", at: Point | None = None, align: str = "", both: bool = False
    ) -> None:
        """Draw an arrow through points; its label, at its middle unless ``at`` says where."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        self._arrows.append(f'<path class="arrow" d="{path}" marker-end="url(#head)"{start}/>')
        if label:
            middle = ((points[0][0] + points[1][0]) / 2, (points[0][1] + points[1][1]) / 2 - 6)
            x, y = at or middle
            for number, line in enumerate(label.split("\n")):
                self._labels.append(
                    f'<text class="label {align}" x="{x:g}" y="{y + number * (_LINE - 1):g}">{escape(line)}</text>'
                )

    def svg(self) -> str:
        """Return it as one SVG."""
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker></defs>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="d" role="img" aria-label="{escape(self.title)}" '
                f'viewBox="0 0 {self.width} {self.height}" width="100%" style="max-width:{self.width}px">',
                f"<title>{escape(self.title)}</title><desc>{escape(self.says)}</desc><style>{_STYLE}</style>{head}",
                f'<rect width="{self.width}" height="{self.height}" fill="var(--bg)" style="stroke:none"/>',
                *self._arrows,
                *self._shapes,
                *self._labels,
                "</svg>\n",
            ]
        )


def architecture() -> Diagram:
    """Return what runs where, and who writes what."""
    d = Diagram(
        "Architecture",
        "Commands, Prefect and Airflow start apps. Apps report to the ledger and read their leases there. The "
        "capacity loop is the only writer of leases and asks the nodes' provider for nodes. Queries run on Spark "
        "workers, trainings on GPU nodes; both keep checkpoints in storage.",
        920,
        406,
    )
    d.box(20, 27, 220, "Command line\nPrefect flows\nAirflow operators")
    d.box(350, 20, 220, "Apps\nqueries: plans and stages\ntrainings: generations\ntuning runs: trials")
    d.box(690, 27, 210, "Checkpoint storage\nof stages and runs,\nlocal directory or S3", "store")
    d.arrow((240, 60), (348, 60), label="start")
    d.arrow((570, 60), (688, 60), label="commit, reuse", both=True)
    d.box(20, 170, 220, "Capacity loop\nobserves, decides, acts;\none leader per cluster", "main", 82)
    d.box(350, 170, 220, "Ledger\nSQLite or PostgreSQL:\napps, nodes, leases,\nevents, decisions", "store")
    d.box(690, 178, 210, "Nodes\nSpark workers,\nGPU nodes")
    d.arrow(
        (460, 102), (460, 168), label="report progress,\nread leases", at=(470, 132), align="start", both=True
    )
    d.arrow((240, 211), (348, 211), label="only writer\nof leases", at=(294, 190), both=True)
    d.arrow(
        (570, 90), (630, 90), (630, 200), (688, 200), label="tasks,\nprocesses", at=(640, 142), align="start"
    )
    d.arrow((795, 93), (795, 176), label="read, write", at=(805, 139), align="start", both=True)
    d.box(20, 320, 220, "Planners\npure functions: policy,\nscaling, guard, re-planning")
    d.box(350, 328, 220, "Node provider\nAWS, or this machine")
    d.arrow((110, 252), (110, 318), label="asks", at=(120, 290), align="start", both=True)
    d.arrow((200, 252), (200, 306), (460, 306), (460, 326), label="request, drain, terminate", at=(330, 300))
    d.arrow((570, 353), (795, 353), (795, 246), label="launch", at=(680, 347))
    d.arrow(
        (690, 230), (640, 230), (640, 275), (160, 275), (160, 254), label="states, notices", at=(580, 269)
    )
    return d


def lease() -> Diagram:
    """Return the life of a lease."""
    d = Diagram(
        "The life of a lease",
        "An auction grants a lease on a free GPU. It is extended until it is revoked, expires, or its node is lost. "
        "A revoked app saves and releases; after the grace period the loop ends its processes.",
        920,
        300,
    )
    d.box(20, 60, 130, "Free GPU")
    d.box(250, 60, 150, "Held\none GPU, 5 minutes", "main")
    d.box(540, 60, 150, "Revoked\nsave, then release", "bad")
    d.box(770, 60, 130, "Ended", "good")
    d.arrow((150, 77), (200, 77), (248, 77), label="granted by\nan auction", at=(198, 54))
    d.arrow((300, 60), (300, 30), (350, 30), (350, 58), label="extended by the next auction", at=(325, 22))
    d.arrow((400, 85), (538, 85), label="another app, quota,\nbudget or notice", at=(469, 62))
    d.arrow((690, 77), (768, 77), label="released", at=(729, 70))
    d.arrow((615, 110), (615, 150), (800, 150), (800, 96), label="grace period over", at=(708, 144))
    d.arrow(
        (345, 110),
        (345, 190),
        (835, 190),
        (835, 96),
        label="not extended: the app leaves 10 s before the end",
        at=(580, 184),
    )
    d.arrow((305, 110), (305, 230), (870, 230), (870, 96), label="node lost", at=(580, 224))
    d.arrow((885, 94), (885, 270), (85, 270), (85, 96), label="the GPU can be granted again", at=(480, 264))
    return d


def node() -> Diagram:
    """Return the life of a node."""
    d = Diagram(
        "The life of a node",
        "A node is planned, requested, observed, and in the end drained and terminated. A notice makes planning "
        "count it as gone at once. A node that is lost ends the leases on it. Without Spot capacity an on-demand "
        "node is requested.",
        920,
        330,
    )
    d.box(20, 70, 130, "Planned\npassed the guard")
    d.box(220, 70, 130, "Requested\ncounts in limits")
    d.box(430, 70, 150, "Observed\nwork runs on it", "main")
    d.box(650, 70, 115, "Draining\nno new work")
    d.box(810, 70, 100, "Terminated", "good", 50)
    d.arrow((150, 95), (218, 95), label="API call")
    d.arrow((350, 95), (428, 95), label="boots")
    d.arrow((580, 95), (648, 95), label="idle")
    d.arrow((765, 95), (808, 95))
    wanting = "no Spot capacity for 5 minutes:\non-demand instead"
    d.arrow((285, 70), (285, 44), (85, 44), (85, 68), label=wanting, at=(185, 22))
    d.arrow(
        (470, 70),
        (470, 44),
        (540, 44),
        (540, 68),
        label="rebalance recommendation:\nonly raises the interruption rate",
        at=(505, 22),
    )
    d.box(430, 180, 150, "Notice\ncounts as gone", "bad")
    d.arrow((505, 120), (505, 178), label="interruption", at=(515, 157), align="start")
    d.arrow((580, 205), (845, 205), (845, 122), label="apps save and leave in time", at=(712, 199))
    d.arrow(
        (430, 205),
        (285, 205),
        (285, 122),
        label="replacement at once,\nif the budget allows",
        at=(295, 171),
        align="start",
    )
    d.box(430, 270, 150, "Lost\nwithout notice", "bad")
    d.arrow((445, 120), (445, 140), (610, 140), (610, 275), (582, 275))
    d.arrow((580, 310), (875, 310), (875, 122), label="leases end; apps resume elsewhere", at=(735, 304))
    d.arrow((430, 295), (85, 295), (85, 122), label="a new node is requested", at=(255, 289))
    return d


def query() -> Diagram:
    """Return the life of a query."""
    d = Diagram(
        "The life of a query",
        "SQL is parsed and measured, candidate plans are made, stages run and commit checkpoints, the last one is "
        "the result. A change of capacity or an unexpected size makes it plan again. After a crash it continues "
        "from finished stages.",
        920,
        330,
    )
    d.box(20, 120, 130, "SQL\nparsed, checked")
    d.box(205, 120, 150, "Candidate plans\nPareto front of\nwork, path, memory")
    d.box(425, 120, 150, "Stages run\non Spark or DuckDB", "main", 66)
    d.box(650, 120, 120, "Checkpoints\nmanifest last", "store", 66)
    d.box(815, 120, 90, "Result", "good", 66)
    d.arrow((150, 145), (203, 145))
    d.arrow((355, 153), (423, 153), label="first to\nfinish", at=(389, 131))
    d.arrow((575, 153), (648, 153), label="commit")
    d.arrow((770, 153), (813, 153))
    d.box(425, 20, 150, "Capacity changed\nnodes, notice, share", "bad")
    d.box(650, 20, 220, "Size not as expected\ntwice or half, or beyond", "bad")
    d.arrow(
        (760, 70), (760, 95), (280, 95), (280, 118), label="plan again; switch if", at=(270, 92), align="end"
    )
    d.arrow((500, 70), (500, 93), label="15 % sooner", at=(270, 107), align="end")
    d.box(425, 255, 150, "Driver lost\ncrash or reboot", "bad")
    d.arrow((500, 186), (500, 253))
    d.arrow((425, 280), (85, 280), (85, 172), label="the same command again", at=(255, 274))
    d.arrow(
        (690, 186), (690, 225), (300, 225), (300, 188), label="reused by any plan or query", at=(405, 219)
    )
    return d


def training() -> Diagram:
    """Return the life of a training."""
    d = Diagram(
        "The life of a training",
        "A training waits for GPUs, may make a preflight run, and trains in generations. At a notice, a change of "
        "nodes or a kill the others train on, or all save and start a new generation; if all are lost, the last "
        "periodic checkpoint counts. Failures are classified before a retry.",
        920,
        388,
    )
    d.box(20, 130, 140, "Waits\nfor min_gpus")
    d.box(225, 130, 140, "Preflight run\na few steps")
    d.box(440, 130, 150, "Generation N\ntrains", "main")
    d.box(760, 130, 140, "Finished\nlast step is saved", "good")
    d.arrow((160, 155), (223, 155))
    d.arrow((365, 155), (438, 155), label="passed")
    d.arrow((590, 155), (758, 155), label="all epochs done")
    d.box(425, 20, 180, "Nodes change\nnotice, lease, resize", "bad")
    d.arrow((480, 130), (480, 72))
    d.arrow(
        (550, 70),
        (550, 128),
        label="the others train on, or all save and leave:\ngeneration N+1 starts at the same step",
        at=(560, 95),
        align="start",
    )
    d.box(425, 225, 180, "Node killed\nothers repeat the step;\nall lost: last checkpoint", "bad")
    d.arrow((480, 180), (480, 223))
    d.arrow((550, 225), (550, 182))
    d.box(425, 318, 180, "Process failed\nfirst error is classified", "bad")
    d.arrow((440, 165), (405, 165), (405, 343), (423, 343))
    d.arrow(
        (605, 330),
        (640, 330),
        (640, 168),
        (592, 168),
        label="retry, elsewhere\nor after a delay",
        at=(650, 246),
        align="start",
    )
    d.box(770, 328, 130, "Stopped\nwith the reason")
    d.arrow((605, 355), (768, 355), label="user or data error", at=(690, 349))
    d.arrow(
        (458, 130), (458, 110), (90, 110), (90, 128), label="fewer GPUs than min_gpus: saved", at=(250, 104)
    )
    return d


DIAGRAMS = {
    "architecture": architecture,
    "life-of-a-lease": lease,
    "life-of-a-node": node,
    "life-of-a-query": query,
    "life-of-a-training": training,
}


def main() -> None:
    """Write all of them."""
    for name, make in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(make().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
