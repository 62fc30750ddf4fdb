"""The page of a cluster in a real browser: no errors, no sideways scrolling, filters and zoom that work."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cluster_page import HOSTILE, crowded, hostile_report

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.machine.page_server import PageServer
from ebbflow.planners.model.ledger import AppReport, Decided, Event
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.report.cluster.live import ClusterFollower
from ebbflow.tasks.report.cluster.page import MOST, cluster_html
from ebbflow.tasks.report.cluster.report import cluster_report
from tests.browser import Tab, browser
from tests.cluster_day import simulated_day
from tests.cluster_events import Book

pytestmark = pytest.mark.processes

TOO_WIDE = """[...document.querySelectorAll('main *')].filter(e => !e.closest('.tl, .scroll, .defs, .sr, pre')
    && e.getBoundingClientRect().right > %d + 0.5).map(e => e.outerHTML.slice(0, 200)).slice(0, 3)"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    events, reports = simulated_day(hours=8)
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(cluster_html(cluster_report(events, reports, listed={"g5.2xlarge": 1.212})))
    return file.as_uri()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(Path(tmp_path_factory.mktemp("browser"))) as found:
        yield found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 768, 1280])
def test_nothing_is_wider_than_the_screen_and_nothing_goes_wrong(tab, page, width, dark):
    tab.open(page, width, dark=dark)
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask(TOO_WIDE % width) == []
    assert tab.problems == []
    assert [url for url in tab.requests if not url.startswith("file:")] == []


@pytest.mark.parametrize("name", [HOSTILE, "x" * 5000, "\u202e" + "אבג דהו " * 30, "mixed אבג 12 (א) end"])
def test_names_that_others_choose_break_nothing(tab, tmp_path, name):
    file = tmp_path / "page.html"
    file.write_text(cluster_html(hostile_report(name)), encoding="utf-8", errors="surrogatepass")
    for width in (320, 390):
        tab.open(file.as_uri(), width)
        tab.ask("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert tab.ask("document.documentElement.scrollWidth") <= width
        assert tab.ask(TOO_WIDE % width) == []
        assert tab.ask("document.scripts.length") == 1
        assert tab.ask("document.images.length") == 0
        # the page's own words stay in their order around names that are written from right to left
        assert tab.ask("getComputedStyle(document.querySelector('h1')).direction") == "ltr"
        assert tab.problems == []
        assert [url for url in tab.requests if not url.startswith("file:")] == []


def test_a_large_cluster_is_a_page_that_a_phone_can_show(tab, tmp_path):
    report = cluster_report(crowded(10_000, apps=200).events)
    assert len(report.apps) == 200
    html = cluster_html(report)
    assert len(html.encode()) < MOST
    file = tmp_path / "large.html"
    file.write_text(html)
    tab.open(file.as_uri(), 390)
    assert tab.ask("document.documentElement.scrollWidth") <= 390
    assert tab.ask("document.querySelectorAll('[data-part=apps] tbody > tr').length") == 200
    assert (
        tab.ask("[...document.querySelectorAll('#decision-rows > tr')].filter(r => r.offsetHeight).length")
        == 50
    )
    assert tab.problems == []


def test_decisions_are_found_by_words_kind_and_effect(tab, page):
    tab.open(page, 1280)
    total = tab.ask("document.querySelectorAll('#decision-rows > tr').length")
    assert total > 20
    assert tab.ask("document.querySelector('#shown').textContent") == f"{total} of {total}"
    shown = "[...document.querySelectorAll('#decision-rows > tr')].filter(row => row.offsetHeight)"
    tab.ask(
        """(() => { const form = document.querySelector('#filter'); form.elements.words.value = 'budget GUARD';
        form.dispatchEvent(new Event('input', {bubbles: true})); })()"""
    )
    found = tab.ask(f"{shown}.map(row => row.textContent.toLowerCase())")
    assert 0 < len(found) < total
    assert all("budget" in text and "guard" in text for text in found)
    tab.ask(
        """(() => { const form = document.querySelector('#filter'); form.elements.words.value = '';
        form.elements.kind.value = 'scaling'; form.dispatchEvent(new Event('input', {bubbles: true})); })()"""
    )
    assert set(tab.ask(f"{shown}.map(row => row.dataset.kind)")) == {"scaling"}
    tab.ask("document.querySelector('#filter').reset()")
    tab.until(f"{shown}.length === {min(total, 50)}")
    assert tab.problems == []


def test_the_timeline_stretches_and_shows_finer_times(tab, page):
    tab.open(page, 1280)
    labels = (
        "[...document.querySelectorAll('.axis text')].filter(t => t.getBoundingClientRect().width).length"
    )
    inner = "document.querySelector('.tl-in').clientWidth"
    before, wide = tab.ask(labels), tab.ask(inner)
    for _ in range(4):
        tab.ask("document.querySelector('[data-zoom=\"2\"]').click()")
    assert tab.ask(inner) == pytest.approx(16 * wide, abs=20)
    assert tab.ask(labels) > before
    assert tab.ask("document.documentElement.scrollWidth") <= 1280
    middle = tab.ask(
        "(p => (p.scrollLeft + p.clientWidth / 2) / p.scrollWidth)(document.querySelector('#timeline-pane'))"
    )
    assert middle == pytest.approx(0.5, abs=0.02)
    tab.ask("document.querySelector('[data-zoom=\"0\"]').click()")
    assert tab.ask(inner) == pytest.approx(wide, abs=2)
    assert tab.problems == []


def test_labels_of_the_axis_do_not_run_into_each_other(tab, page):
    for width in (320, 768, 1280):
        tab.open(page, width)
        gaps = tab.ask(
            """(() => { const boxes = [...document.querySelectorAll('.axis text')].map(t => t.getBoundingClientRect())
            .filter(b => b.width).sort((a, b) => a.left - b.left);
            return boxes.slice(1).map((b, i) => b.left - boxes[i].right); })()"""
        )
        assert min(gaps) > 0


class Growing:
    """A ledger in memory that somebody writes to while it is looked at."""

    def __init__(self, book: Book) -> None:
        self.book = book

    def events(self, after: int = 0, limit: int = 1000) -> list[Event]:
        return self.book.events[after : after + limit]

    def reports(self, **_: object) -> dict[str, AppReport]:
        return {}

    def origin(self) -> State:
        return State()

    def leader(self) -> None:
        return None


def test_a_live_page_follows_and_keeps_what_its_reader_did(tab):
    events, _ = simulated_day(hours=8)
    book = Book()
    for event in events:
        book.write(event.at - book.start, event.change)
    follower = ClusterFollower(Growing(book), SystemClock())
    with PageServer(follower.answer) as server:
        tab.open(server.url, 1280)
        tab.ask(
            """(() => { const form = document.querySelector('#filter'); form.elements.words.value = 'zebra';
            form.dispatchEvent(new Event('input', {bubbles: true}));
            for (let i = 0; i < 3; i++) document.querySelector('[data-zoom="2"]').click();
            document.querySelector('#timeline-pane').scrollLeft = 700;
            document.querySelector('[data-part="fairness"] details').open = true;
            window.scrollTo(0, 900); })()"""
        )
        assert tab.ask("document.querySelector('#shown').textContent").startswith("0 of ")
        before = tab.ask("document.querySelector('[data-part=timeline]').dataset.digest")
        guard = Decided("guard", "no zebra gets <b>in</b>", inputs={"x": "y"})
        book.write(events[-1].at - book.start + 60, guard)
        tab.until("document.querySelector('#shown').textContent.startsWith('1 of ')")
        assert tab.ask("document.querySelector('[data-part=timeline]').dataset.digest") != before
        assert tab.ask("document.querySelector('#filter').elements.words.value") == "zebra"
        assert tab.ask("document.querySelector('#timeline-pane').scrollLeft") == pytest.approx(700, abs=20)
        assert tab.ask("document.querySelector('[data-part=fairness] details').open") is True
        assert tab.ask("window.scrollY") == pytest.approx(900, abs=60)
        tab.until("document.querySelector('#live').textContent.startsWith('Live, as of')")
        assert tab.problems == []
        assert all(url.startswith(server.url) for url in tab.requests)
    tab.until("document.querySelector('#live').classList.contains('off')")
    assert "not served any more" in tab.ask("document.querySelector('#live').textContent")
