#!/usr/bin/env bash
# tools.sh [TOOL...]: programs that Ebbflow and its tests need beside Python's packages; all of them unless some are named.
# What is missing is installed where apt-get and root allow it; else one error says how to come by it, and nothing goes on.
set -euo pipefail

# tool | packages of Debian and Ubuntu, "or" between alternatives; a note in [] where there are none | what for
tools='
java      | openjdk-17-jre-headless or openjdk-21-jre-headless or default-jre-headless | Spark: Java 17 or later, in PATH or JAVA_HOME
postgres  | postgresql | the ledger: the programs of a PostgreSQL server
chromium  | chromium fonts-dejavu-core | tests of pages: Chromium or Chrome, in PATH or CHROMIUM
faketime  | libfaketime | tests of clocks that jump
sqlite3   | sqlite3 | examples of the pages that look into a ledger
prometheus | prometheus | tests of metrics: a Prometheus that scrapes them
ip        | iproute2 | networks of nodes on this machine
mount     | mount | tests of full disks
systemd   | systemd | tests of the units of nodes on AWS: systemd-analyze
terraform | [Terraform 1.9 or later from https://developer.hashicorp.com/terraform/install, in PATH] | tests of the Terraform modules
'

major() { "$1" -version 2>&1 | sed -nE 's/.*version "(1\.)?([0-9]+).*/\2/p' | head -n 1; }
any() { local one; for one in "$@"; do command -v "$one" >/dev/null 2>&1 && return; done; return 1; }

have() {
  case $1 in
    java)
      local java
      for java in "${JAVA_HOME:+$JAVA_HOME/bin/java}" "$(command -v java || true)"; do
        if [ -x "$java" ] && [ "$(major "$java")" -ge 17 ] 2>/dev/null; then return; fi
      done
      return 1 ;;
    postgres) any initdb || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null ;;
    chromium) [ -x "${CHROMIUM:-}" ] || any chromium chromium-browser google-chrome ;;
    faketime) compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || compgen -G '/usr/lib*/faketime/libfaketime.so.1' >/dev/null ;;
    systemd) any systemd-analyze ;;
    ip) PATH=$PATH:/usr/sbin:/sbin any ip ;;
    *) any "$1" ;;
  esac
}

field() { # TOOL NUMBER
  sed -nE "s/^$1 *\| *//p" <<<"$tools" | awk -F ' *[|] *' -v n="$2" '{ print $n }'
}

names() { sed -nE 's/^([a-z0-9]+) *\|.*/\1/p' <<<"$tools"; }

[ $# -gt 0 ] || set -- $(names)
missing=()
for tool in "$@"; do
  [ -n "$(field "$tool" 1)" ] || { echo "error: no tool is called $tool; there are: $(echo $(names))" >&2; exit 2; }
  have "$tool" || missing+=("$tool")
done
[ ${#missing[@]} -gt 0 ] || exit 0

wanted=() # packages, the first alternative of each that apt knows
choose() {
  local tool list one
  wanted=()
  for tool in "${missing[@]}"; do
    list=$(field "$tool" 1)
    case $list in \[*) continue ;; esac
    one=${list%% or *}
    while [[ $list == *" or "* ]] && command -v apt-cache >/dev/null && ! apt-cache show ${one%% *} >/dev/null 2>&1; do
      list=${list#* or }
      one=${list%% or *}
    done
    wanted+=($one)
  done
}

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  apt-get update -qq >"$log" 2>&1 || true # what is known of packages may do
  choose
  if [ ${#wanted[@]} -gt 0 ]; then
    echo "installing ${wanted[*]} (once)"
    if [[ " ${missing[*]} " == *" postgres "* && ! -e /etc/postgresql-common/createcluster.conf ]]; then
      mkdir -p /etc/postgresql-common # no cluster of the package's own: the tests make theirs in a temporary folder
      echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}" >>"$log" 2>&1 || tail -n 15 "$log" >&2
  fi
else
  choose
fi

left=()
for tool in "${missing[@]}"; do have "$tool" || left+=("$tool"); done
[ ${#left[@]} -gt 0 ] || exit 0
{
  echo "error: ${#left[@]} of the needed programs are missing; install them and start again:"
  missing=("${left[@]}")
  choose
  [ ${#wanted[@]} -eq 0 ] || echo "  as root on Debian or Ubuntu: apt-get install --no-install-recommends ${wanted[*]}"
  for tool in "${left[@]}"; do
    from=$(field "$tool" 1)
    case $from in \[*) from="; ${from:1:-1}" ;; *) from= ;; esac
    echo "  $tool: for $(field "$tool" 2)$from"
  done
} >&2
exit 1
