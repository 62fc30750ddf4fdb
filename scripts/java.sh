#!/usr/bin/env bash
# java.sh: Java 17 or later, for Spark; installed where apt-get and root allow it.
set -euo pipefail

major() { "$1" -version 2>&1 | sed -nE 's/.*version "(1\.)?([0-9]+).*/\2/p' | head -n 1; }

for java in "${JAVA_HOME:+$JAVA_HOME/bin/java}" "$(command -v java || true)"; do
  if [ -x "$java" ] && [ "$(major "$java")" -ge 17 ] 2>/dev/null; then exit 0; fi
done

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing Java 17 for Spark (once)"
  apt-get update -qq
  if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless >/dev/null ||
     DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends default-jre-headless >/dev/null; then
    exit 0
  fi
fi
echo "error: Spark needs Java 17 or later; install it (Debian, Ubuntu: apt-get install openjdk-17-jre-headless) or set JAVA_HOME" >&2
exit 1
