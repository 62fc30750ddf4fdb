#!/usr/bin/env bash
# postgres.sh: PostgreSQL's server programs, for the ledger's tests; installed where apt-get and root allow it.
set -euo pipefail

if command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; then exit 0; fi

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing PostgreSQL for the ledger's tests (once)"
  apt-get update -qq
  # no cluster of the package's own: the tests make theirs in a temporary folder
  mkdir -p /etc/postgresql-common
  [ -e /etc/postgresql-common/createcluster.conf ] ||
    echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
  if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >/dev/null; then
    exit 0
  fi
fi
echo "note: PostgreSQL is not here, so the ledger is tested on SQLite only; install it (Debian, Ubuntu: apt-get install postgresql)" >&2
