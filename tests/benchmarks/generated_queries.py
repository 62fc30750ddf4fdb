"""Generated queries, run by Ebbflow in several stages and by DuckDB alone: differences, and the share planned.

Run from the repository root: ``python -m tests.benchmarks.generated_queries --count 2000 [--first SEED]``. Prints
each difference with its query and seed, and a table by construct; exits with 1 when there is a difference. ``--out``
writes the counts as JSON too; ``--add`` adds up what such files have of other seeds.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.tasks.query.generated_sql import comparison, generated


def main() -> None:
    """Compare the queries of the seeds that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="seed of the first query")
    parser.add_argument("--count", type=int, default=2000, help="queries")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the counts")
    parser.add_argument(
        "--add", type=Path, nargs="*", default=[], help="JSON files of earlier runs to add up"
    )
    given = parser.parse_args()
    seen, planned, stages = Counter[str](), Counter[str](), Counter[int]()
    wrong = refused = 0
    with tempfile.TemporaryDirectory() as folder, comparison(Path(folder)) as differences:
        for seed in range(given.first, given.first + given.count):
            statement = generated(seed)
            found, answer = differences(statement)
            if found:
                wrong += 1
                print(f"seed {seed}: {found}\n  {statement.sql}", flush=True)
            if answer.error:
                refused += 1
                continue
            stages[answer.stages] += 1
            for construct in ("all", *statement.constructs):
                seen[construct] += 1
                planned[construct] += answer.planned
    count, seeds = given.count, [[given.first, given.first + given.count]] if given.count else []
    for path in given.add:
        told = json.loads(path.read_text())
        count, wrong, refused = (
            count + told["queries"],
            wrong + told["differences"],
            refused + told["refused"],
        )
        seeds += told["seeds"]
        seen.update({name: of["queries"] for name, of in told["constructs"].items()})
        planned.update({name: of["planned"] for name, of in told["constructs"].items()})
        stages.update({int(number): of for number, of in told["stages"].items()})
    if given.out:
        counts = {
            "benchmark": "generated_queries",
            "seeds": sorted(seeds),  # from, and before
            "queries": count,
            "differences": wrong,
            "refused": refused,  # by DuckDB, too
            "stages": dict(sorted(stages.items())),
            "constructs": {name: {"queries": seen[name], "planned": planned[name]} for name in sorted(seen)},
        }
        given.out.write_text(json.dumps(counts, indent=1) + "\n")
    print(f"{count} queries, {wrong} differences, {refused} wrong ones told by both")
    print("queries by stages:", ", ".join(f"{number}: {count}" for number, count in sorted(stages.items())))
    print("| construct | queries | planned |\n|---|---|---|")
    for construct in sorted(seen, key=lambda one: (one != "all", one)):
        print(f"| {construct} | {seen[construct]} | {100 * planned[construct] / seen[construct]:.0f} % |")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
