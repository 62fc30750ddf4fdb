#!/usr/bin/env bash
# ebbflow-spark ACTION: start, stop or status of the worker; master and history-server and worker run a daemon.
set -euo pipefail
set -a
. /etc/ebbflow/node.env
set +a
unit=ebbflow-spark-worker.service
export SPARK_HOME=/opt/ebbflow/spark SPARK_CONF_DIR=/etc/ebbflow/spark PYSPARK_PYTHON=/opt/ebbflow/bin/python
class="$SPARK_HOME/bin/spark-class"

address() { # IMDSv2: a token first
  local token
  token=$(curl -sSf --max-time 5 --retry 3 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' \
    http://169.254.169.254/latest/api/token)
  curl -sSf --max-time 5 --retry 3 -H "X-aws-ec2-metadata-token: $token" \
    http://169.254.169.254/latest/meta-data/local-ipv4
}

case "$1" in
  start)
    if [ -e /run/ebbflow/draining ]; then
      echo "this node is leaving" >&2
      exit 1
    fi
    systemctl start "$unit"
    ;;
  stop) systemctl stop "$unit" ;;
  status) systemctl is-active "$unit" || true ;;
  master)
    host=$(address)
    export SPARK_LOCAL_IP=$host
    export SPARK_MASTER_OPTS="-Dspark.deploy.recoveryMode=FILESYSTEM -Dspark.deploy.recoveryDirectory=/var/lib/ebbflow/spark/recovery"
    exec "$class" org.apache.spark.deploy.master.Master --host "$host" --port 7077 --webui-port 8080
    ;;
  history-server)
    SPARK_LOCAL_IP=$(address)
    export SPARK_LOCAL_IP
    export SPARK_HISTORY_OPTS="-Dspark.history.fs.logDirectory=$EBBFLOW_SPARK_EVENTS -Dspark.history.ui.port=18080"
    exec "$class" org.apache.spark.deploy.history.HistoryServer
    ;;
  worker)
    host=$(address)
    export SPARK_LOCAL_IP=$host SPARK_WORKER_OPTS="-Dspark.decommission.enabled=true -Dspark.worker.cleanup.enabled=true"
    # the kernel's and the agent's share stays free: 1 GiB, or an eighth where that is more
    total=$(awk '/^MemTotal:/ { print int($2 / 1024) }' /proc/meminfo)
    kept=$((total / 8 > 1024 ? total / 8 : 1024))
    exec "$class" org.apache.spark.deploy.worker.Worker --host "$host" --webui-port 8081 \
      --memory "$((total - kept))m" --work-dir /var/lib/ebbflow/work "$EBBFLOW_SPARK_MASTER"
    ;;
  *)
    echo "usage: ebbflow-spark start|stop|status|master|history-server|worker" >&2
    exit 2
    ;;
esac
