"""Log lines of JSON: one object each, with the ids of what a thread works at."""

import io
import json
import logging
import threading

from ebbflow.infra.logs.json_lines import JsonLines, current_ids, log_ids


def test_a_line_has_the_ids_of_its_thread_and_no_other() -> None:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonLines())
    log = logging.Logger("some.place", logging.INFO)
    log.addHandler(handler)
    said = threading.Event()

    def other() -> None:
        with log_ids(app="b"):
            said.wait(60)
            log.warning("from another\nthread")

    thread = threading.Thread(target=other)
    thread.start()
    log.info("before %s", "all")
    with log_ids(run="r", app="a"):
        with log_ids(stage="s"):
            log.info("in a stage")
        said.set()
        thread.join(150)
        try:
            raise ValueError("für Ä")
        except ValueError:
            log.exception("failed")
    assert current_ids() == {}
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    ids = [{key: one.get(key) for key in ("run", "app", "stage") if key in one} for one in lines]
    assert ids == [{}, {"run": "r", "app": "a", "stage": "s"}, {"app": "b"}, {"run": "r", "app": "a"}]
    assert [one["message"] for one in lines] == ["before all", "in a stage", "from another\nthread", "failed"]
    assert lines[0]["level"] == "info"
    assert lines[0]["logger"] == "some.place"
    assert lines[0]["time"].endswith("+00:00")
    assert lines[3]["error"].endswith("ValueError: für Ä")
