#!/usr/bin/env bash
# audit.sh [VENV]: known vulnerabilities of the locked packages, by pip-audit; fails at any without a reason.
#
# It asks a database on the internet (--vulnerability-service osv or pypi, by SERVICE). Where none can be reached it says
# so and fails with status 3: nothing was found out then. pip-audit has an environment of its own (default .cache/audit).
#
# An exception is a line in scripts/audit-exceptions.txt: the vulnerability's id, a space, and why it does not matter here.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.cache/audit}
service=${SERVICE:-osv}
exceptions=scripts/audit-exceptions.txt

if [ ! -x "$venv/bin/pip-audit" ]; then
  echo "setting up $venv (once)"
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check pip-audit==2.10.1
fi

ignored=()
if [ -f "$exceptions" ]; then
  while read -r id reason; do
    case $id in ''|'#'*) continue ;; esac
    [ -n "$reason" ] || { echo "error: $exceptions gives no reason for $id" >&2; exit 1; }
    ignored+=(--ignore-vuln "$id")
  done <"$exceptions"
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
for lock in requirements.lock requirements-torch.lock requirements-airflow.lock; do
  [ -f "$lock" ] || continue
  echo "$lock: asking $service"
  if "$venv/bin/pip-audit" --requirement "$lock" --strict --no-deps --disable-pip --vulnerability-service "$service" \
     --timeout 20 --progress-spinner off "${ignored[@]}" 2>"$log"; then
    cat "$log"
  elif grep -qiE "ConnectionError|ServiceError|Max retries|timed out|resolve|Tunnel|proxy|Could not connect|could not be audited|HTTP(S)?ConnectionPool" "$log"; then
    tail -n 3 "$log" >&2
    echo "error: no database of vulnerabilities can be reached from here, so nothing was found out" >&2
    exit 3
  else
    cat "$log" >&2
    status=1
  fi
done
exit $status
