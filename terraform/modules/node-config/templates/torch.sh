#!/usr/bin/env bash
# ebbflow-torch ACTION NAME [ENTRY]: start, stop or status of one training's node process; ENTRY is base64.
set -euo pipefail
action=$1 name=$2 entry=${3:-}
unit="ebbflow-torch-node@$name.service"

case "$action" in
  start)
    if systemctl is-active --quiet "$unit"; then exit 0; fi
    if [ -e /run/ebbflow/draining ]; then
      echo "this node is leaving" >&2
      exit 1
    fi
    [ -n "$entry" ] || { echo "an entry is needed to start $name" >&2; exit 2; }
    install -d -m 0755 /run/ebbflow
    umask 077 # the entry names the training's store
    # within single quotes systemd takes the JSON as it is; a quote of its own becomes an escape of JSON's
    printf "EBBFLOW_NODE_ENTRY='%s'\n" "$(base64 --decode <<< "$entry" | sed "s/'/\\\\u0027/g")" \
      > "/run/ebbflow/torch-$name.env"
    systemctl start "$unit"
    ;;
  stop)
    # SIGTERM would be a notice to the node process, which then goes on; who stops it wants it gone
    systemctl kill --signal=SIGKILL "$unit" 2> /dev/null || true
    systemctl stop "$unit"
    rm -f "/run/ebbflow/torch-$name.env"
    ;;
  status) systemctl is-active "$unit" || true ;;
  *)
    echo "usage: ebbflow-torch start|stop|status NAME [ENTRY]" >&2
    exit 2
    ;;
esac
