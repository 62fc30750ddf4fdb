#!/usr/bin/env bash
# test.sh PYTEST...: the whole suite. Tests that start processes of their own mostly wait, one after the other; the
# others fill the time they leave, at low priority and with one thread each, and are shown at the end.
set -uo pipefail
unset PYTHONDONTWRITEBYTECODE # some hundred processes would each compile the package anew
others=$(mktemp)
OMP_NUM_THREADS=1 nice -n 19 "$@" -n 2 --dist loadscope -m "not slow and not alone" >"$others" 2>&1 &
pid=$!
trap 'kill "$pid" 2>/dev/null; cat "$others"; rm -f "$others"; exit 130' INT TERM
"$@" -m "alone and not slow"
alone=$?
wait "$pid"
result=$?
cat "$others"
rm -f "$others"
exit $((alone > result ? alone : result))
