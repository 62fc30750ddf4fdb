#!/usr/bin/env bash
# test.sh PYTEST...: the whole suite, in three parts side by side. Tests that start processes of their own mostly wait:
# those with a JVM and those without go one after the other, each in a part. The rest, which wait too, go three at a
# time, at low priority and with one thread each. What the first part says is shown as it comes, the others' at the end.
set -uo pipefail
unset PYTHONDONTWRITEBYTECODE # some hundred processes would each compile the package anew
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; cat "$folder"/*; rm -rf "$folder"; exit 130' INT TERM
OMP_NUM_THREADS=1 nice -n 19 "$@" -n 3 --dist loadscope -m "not slow and not alone" >"$folder/rest" 2>&1 &
rest=$!
"$@" -m "alone and spark and not slow" >"$folder/spark" 2>&1 &
spark=$!
"$@" -m "alone and not spark and not slow"
results=("$?")
for part in "$spark" "$rest"; do
  wait "$part"
  results+=("$?")
done
cat "$folder/spark" "$folder/rest"
rm -rf "$folder"

worst=5 # pytest's status for no tests, which is right for a part as long as another has some
for result in "${results[@]}"; do
  if [ "$result" != 5 ] && { [ "$worst" = 5 ] || [ "$result" -gt "$worst" ]; }; then worst=$result; fi
done
exit "$worst"
