#!/usr/bin/env bash
# test.sh PYTEST...: the whole suite, in parts side by side. Tests that start processes of their own mostly wait: those
# with a JVM go one after the other in a part, those without in two, shared out by folder. The rest is shared among
# parts of low priority, with one thread each. What the first part says is shown as it comes, the others' at the end.
set -uo pipefail
unset PYTHONDONTWRITEBYTECODE # some hundred processes would each compile the package anew
shares=2 # each imports everything first
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; cat "$folder"/*; rm -rf "$folder"; exit 130' INT TERM
parts=()
for share in $(seq $shares); do
  OMP_NUM_THREADS=1 nice -n 10 "$@" --share "$share/$shares" -m "not slow and not alone" >"$folder/rest-$share" 2>&1 &
  parts+=($!)
done
"$@" -m "alone and spark and not slow" >"$folder/spark" 2>&1 &
parts+=($!)
"$@" --share 1/2 -m "alone and not spark and not slow" >"$folder/processes" 2>&1 &
parts+=($!)
"$@" --share 2/2 -m "alone and not spark and not slow"
results=("$?")
for part in "${parts[@]}"; do
  wait "$part"
  results+=("$?")
done
cat "$folder"/*
rm -rf "$folder"

worst=5 # pytest's status for no tests, which is right for a part as long as another has some
for result in "${results[@]}"; do
  if [ "$result" != 5 ] && { [ "$worst" = 5 ] || [ "$result" -gt "$worst" ]; }; then worst=$result; fi
done
exit "$worst"
