#!/usr/bin/env bash
# test.sh PYTEST...: the whole suite, in parts side by side. Tests that start processes of their own mostly wait: those
# with a JVM go one after the other in a part, those without in two, shared out by folder. The rest is shared among
# parts of low priority, with one thread each. What the first part says is shown as it comes, the others' at the end,
# and then what each part took: two cores are busy to the end when all parts end at about the same time.
set -uo pipefail
unset PYTHONDONTWRITEBYTECODE # some hundred processes would each compile the package anew
"$1" -m compileall -q -j 2 flows infra planners tasks # parts that begin at once would each do so, too
shares=3 # each imports everything first
folder=$(mktemp -d)
parts=()

stop() {
  for one in "${parts[@]}"; do
    kill $(cat "/proc/$one/task/$one/children") "$one"
  done 2>/dev/null
  cat "$folder"/*.out
  rm -rf "$folder"
  exit 130
}
trap stop INT TERM

# part NAME COMMAND...: run a part and note what it took; orphans of tests are not in its CPU seconds
part() {
  local TIMEFORMAT="$1: %R s, of the CPU %U + %S s" name=$1
  shift
  { time "$@" 2>&3; } 3>&2 2>"$folder/$name.time"
}

for share in $(seq $shares); do
  OMP_NUM_THREADS=1 part "rest-$share" nice -n 10 "$@" --share "$share/$shares" -m "not slow and not alone" \
    >"$folder/rest-$share.out" 2>&1 &
  parts+=($!)
done
part spark "$@" -m "alone and spark and not slow" >"$folder/spark.out" 2>&1 &
parts+=($!)
part processes-1 "$@" --share 1/2 -m "alone and not spark and not slow" >"$folder/processes-1.out" 2>&1 &
parts+=($!)
part processes-2 "$@" --share 2/2 -m "alone and not spark and not slow"
results=("$?")
for one in "${parts[@]}"; do
  wait "$one"
  results+=("$?")
done
cat "$folder"/*.out "$folder"/*.time
rm -rf "$folder"

worst=5 # pytest's status for no tests, which is right for a part as long as another has some
for result in "${results[@]}"; do
  if [ "$result" != 5 ] && { [ "$worst" = 5 ] || [ "$result" -gt "$worst" ]; }; then worst=$result; fi
done
exit "$worst"
