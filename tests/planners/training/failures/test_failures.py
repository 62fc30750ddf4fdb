"""The classifier on real logs, on printed texts, on near misses, and as a function."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from printed_failures import HEAD, NEAR_MISSES, PRINTED

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.failures import failures
from ebbflow.planners.training.failures.failures import (
    Failure,
    FailureClass,
    FailureEvent,
    FailureReason,
    FailureTable,
    RankEnd,
    classify,
)
from ebbflow.planners.training.failures.text import errors, normalized, tail

FOLDER = Path(__file__).parents[3] / "fixtures" / "training" / "failures"
TABLE = FailureTable.parse(tomllib.loads((Path(failures.__file__).parent / "failures.toml").read_text()))
BY_EVENT = {"spot-revocation": "spot-notice", "preempted": "preempted", "node-lost": "node-lost"}


def logged() -> list[tuple[str, int, str]]:
    found = []
    for path in sorted(FOLDER.glob("*.log")):
        head, _, text = path.read_text().partition("\n")
        found.append((path.stem.rpartition("-")[0], int(head.removeprefix("# exit ")), text))
    return found


def of(code: int, text: str) -> Failure:
    return classify([RankEnd(0, code, text, "node-1")], TABLE)


@pytest.mark.parametrize(("reason", "code", "text"), logged())
def test_real_logs(reason: str, code: int, text: str) -> None:
    assert of(code, text).reason == reason


@pytest.mark.parametrize(
    ("reason", "code", "text"), [(reason, *sample) for reason, of_it in PRINTED.items() for sample in of_it]
)
def test_printed_texts(reason: str, code: int, text: str) -> None:
    assert of(code, text).reason == reason


@pytest.mark.parametrize(("near", "reason", "code", "text"), NEAR_MISSES)
def test_near_misses(near: str, reason: str, code: int, text: str) -> None:
    assert reason != near
    assert of(code, text).reason == reason


def test_every_reason_has_samples() -> None:
    positive = Counter(reason for reason, *_ in logged()) + Counter({r: len(s) for r, s in PRINTED.items()})
    positive["no-signature"] += sum(reason == "no-signature" for _, reason, *_ in NEAR_MISSES)
    near = {reason for reason, *_ in NEAR_MISSES}
    for reason in set(FailureReason) - set(BY_EVENT):
        assert positive[reason] >= 3, reason
        assert reason in near, reason
    assert {rule.reason for rule in TABLE.rules} <= set(FailureReason)
    assert {rule.failure_class for rule in TABLE.rules} | {FailureClass.UNKNOWN} == set(FailureClass)


@pytest.mark.parametrize("log", ["", HEAD + "ValueError: no", "MPI_ABORT was invoked"])
@pytest.mark.parametrize(("reason", "kind"), BY_EVENT.items())
def test_events_win_over_text(reason: str, kind: failures.EventKind, log: str) -> None:
    ends = [RankEnd(0, 1, log), RankEnd(1, -9)]
    found = classify(ends, TABLE, [FailureEvent(kind, "node-2", "in 120 s")])
    assert (found.reason, found.failure_class) == (reason, FailureClass.SCHEDULER)
    assert (found.node, found.line) == ("node-2", f"{kind}: in 120 s")


def test_signals_by_name_and_by_shell_code() -> None:
    assert RankEnd(0, -9).signal == RankEnd(0, 137).signal == "SIGKILL"
    assert RankEnd(0, 1).signal == RankEnd(0, 255).signal == ""
    assert of(139, "").reason == "invalid-memory-access"


def test_a_process_that_survived_an_error_died_of_something_else() -> None:
    survived = HEAD + "ZeroDivisionError: division by zero\nepoch 1 finished\n"
    assert of(-11, survived).reason == "invalid-memory-access"
    assert of(1, survived).reason == "traceback"


def test_the_first_error_counts() -> None:
    first = HEAD + "FileNotFoundError: [Errno 2] No such file or directory: 'a'\n"
    then = "\nDuring handling of the above exception, another exception occurred:\n\n"
    second = HEAD + "TypeError: 'NoneType' object is not subscriptable\n"
    assert of(1, first + then + second).reason == "incorrect-inputs"
    assert of(1, second + then + first).reason == "semantic-error"


PEER = HEAD + "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8896."


def test_the_first_rank_counts() -> None:
    ends = [RankEnd(0, 1, HEAD + "KeyError: 3", at=50.0), RankEnd(1, 1, HEAD + "TypeError: no", "b", at=10.0)]
    assert classify(ends, TABLE).reason == "semantic-error"
    assert classify(ends, TABLE).rank == 1


def test_a_broken_connection_is_another_ranks_error() -> None:
    broken, cause = RankEnd(0, 1, PEER, at=10.0), RankEnd(1, 1, HEAD + "KeyError: 3", "b", at=12.0)
    assert classify([broken, cause], TABLE).reason == "traceback"
    assert classify([broken, cause], TABLE, slack=1.0).reason == "communication-error"
    assert classify([broken, RankEnd(1, -9, at=12.0)], TABLE).reason == "communication-error"


def test_nothing_known() -> None:
    assert classify([], TABLE).reason == "no-signature"
    found = classify([RankEnd(0, 0, HEAD + "KeyError: 3"), RankEnd(2, 3, "bye", "c")], TABLE)
    assert (found.reason, found.failure_class, found.rank) == ("no-signature", "unknown", 2)
    assert "exit code 3" in found.line


def test_signatures_ignore_what_differs_from_run_to_run() -> None:
    def log(line: int, size: int, path: str) -> str:
        return (
            f'Traceback (most recent call last):\n  File "{path}/train.py", line {line}, in step\n    x\n'
            f"RuntimeError: mat1 and mat2 shapes cannot be multiplied ({size}x9 and 8x4)"
        )

    one, other = of(1, log(3, 2, "/a")), of(1, log(31, 64, "/tmp/run-7"))
    assert one.signature == other.signature
    assert one.signature != of(1, log(3, 2, "/a").replace("in step", "in evaluate")).signature
    assert one.signature != of(1, log(3, 2, "/a").replace("RuntimeError: mat1", "TypeError: mat1")).signature
    segfault = "Fatal Python error: Segmentation fault\n\nCurrent thread {} (most recent call first):\n"
    assert of(-11, segfault.format("0x7f5c")).signature == of(-11, segfault.format("0x1a2b")).signature


def test_ranks_and_colours_are_taken_off() -> None:
    text = "\n".join(f"[rank3]: {line}" for line in (HEAD + "TypeError: no").splitlines())
    assert [e.line for e in errors(tail("\x1b[31m" + text + "\x1b[0m"))] == ["TypeError: no"]
    assert len(tail("x\n" * 500)) == 200


def test_a_users_rules_go_first() -> None:
    mine = FailureTable.parse(
        {
            "rule": [
                {
                    "reason": "licence",
                    "class": "infrastructure",
                    "tracebacks": ["no licence"],
                    "says": "Wait.",
                }
            ]
        }
    )
    both = TABLE.extended(mine)
    log = HEAD + "RuntimeError: no licence is free"
    assert of(1, log).reason == "traceback"
    found = classify([RankEnd(0, 1, log)], both)
    assert (found.reason, found.failure_class) == ("licence", "infrastructure")
    assert found.advice == "Wait."
    assert classify([RankEnd(0, 1, HEAD + "KeyError: 1")], both).reason == "traceback"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "keys rule and ignored"),
        ({"rules": []}, "keys rule and ignored"),
        ({"rule": {"reason": "x"}}, "list of tables"),
        ({"rule": [{"reason": "x"}]}, "has reason and class"),
        ({"rule": [{"reason": "x", "class": "user", "pattern": ["a"]}]}, "pattern"),
        ({"rule": [{"reason": "x", "class": "users", "patterns": ["a"]}]}, "'users'"),
        ({"rule": [{"reason": " ", "class": "user", "patterns": ["a"]}]}, "must be a text"),
        ({"rule": [{"reason": "x", "class": "user"}]}, "no condition"),
        ({"rule": [{"reason": "x", "class": "user", "patterns": "a"}]}, "list of texts"),
        ({"rule": [{"reason": "x", "class": "user", "patterns": ["("]}]}, "no regular expression"),
        ({"rule": [{"reason": "x", "class": "user", "signals": ["SEGV"]}]}, "SEGV"),
        ({"rule": [{"reason": "x", "class": "user", "events": ["rain"]}]}, "rain"),
        ({"rule": [{"reason": "x", "class": "user", "exit-codes": [0]}]}, "not 0"),
        ({"ignored": ["["]}, "no regular expression"),
    ],
)
def test_bad_tables(data: object, words: str) -> None:
    with pytest.raises(OptionError, match=words.replace("(", "\\(")):
        FailureTable.parse(data)  # type: ignore[arg-type]


@given(st.text(max_size=400), st.integers(-31, 255).filter(bool))
def test_any_text_has_an_answer(text: str, code: int) -> None:
    first = of(code, text)
    assert first == of(code, text)
    assert len(first.signature) == 12


@given(st.text(max_size=200))
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalized(normalized(text)) == normalized(text)


@given(st.permutations([RankEnd(n, 1, HEAD + f"{kind}Error: x", at=n * 1.5) for n, kind in enumerate("AB")]))
def test_the_order_of_ranks_means_nothing(ends: list[RankEnd]) -> None:
    assert classify(ends, TABLE).rank == 0


def test_rules_in_order_dominate() -> None:
    rows = [
        {"reason": "one", "class": "user", "patterns": ["both"]},
        {"reason": "two", "class": "data", "patterns": ["both", "second"]},
    ]
    table = FailureTable.parse({"rule": rows})
    assert classify([RankEnd(0, 1, "both")], table).reason == "one"
    assert classify([RankEnd(0, 1, "second")], table).reason == "two"
    assert classify([RankEnd(0, 1, "second\nboth")], table).reason == "two"
