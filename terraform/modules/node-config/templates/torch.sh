#!/usr/bin/env bash
# ebbflow-torch ACTION NAME [ENTRY]: start, stop or status of one training's node process; ENTRY is base64.
set -euo pipefail
action=$1 name=$2 entry=${3:-}
unit="ebbflow-torch-node@$name.service"
key="/run/ebbflow/torch-$name.key" # in memory only, and gone with the node process

case "$action" in
  start)
    if systemctl is-active --quiet "$unit"; then
      cat "$key.public"
      exit 0
    fi
    if [ -e /run/ebbflow/draining ]; then
      echo "this node is leaving" >&2
      exit 1
    fi
    [ -n "$entry" ] || { echo "an entry is needed to start $name" >&2; exit 2; }
    install -d -m 0755 /run/ebbflow
    umask 077
    # The node's own pair of keys: the secret half stays here, the launcher learns the public one from this output.
    announced=$(/opt/ebbflow/bin/python -P -m ebbflow.infra.training.channel.keys "$key")
    chown ebbflow "$key"
    # within single quotes systemd takes the JSON as it is; a quote of its own becomes an escape of JSON's
    {
      printf "EBBFLOW_NODE_ENTRY='%s'\n" "$(base64 --decode <<< "$entry" | sed "s/'/\\\\u0027/g")"
      printf "EBBFLOW_NODE_SECRET_FILE='%s'\n" "$key"
    } > "/run/ebbflow/torch-$name.env"
    systemctl start "$unit"
    echo "$announced"
    ;;
  stop)
    # SIGTERM would be a notice to the node process, which then goes on; who stops it wants it gone
    systemctl kill --signal=SIGKILL "$unit" 2> /dev/null || true
    systemctl stop "$unit"
    rm -f "/run/ebbflow/torch-$name.env" "$key" "$key.public"
    ;;
  status) systemctl is-active "$unit" || true ;;
  *)
    echo "usage: ebbflow-torch start|stop|status NAME [ENTRY]" >&2
    exit 2
    ;;
esac
