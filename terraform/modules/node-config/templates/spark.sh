#!/usr/bin/env bash
# ebbflow-spark ACTION: start, stop or status of the worker; master and history-server and worker run a daemon;
# conf writes the settings of Spark with the secret of the cluster.
set -euo pipefail
set -a
. /etc/ebbflow/node.env
set +a
unit=ebbflow-spark-worker.service
export SPARK_HOME=/opt/ebbflow/spark SPARK_CONF_DIR=/var/lib/ebbflow/spark/conf PYSPARK_PYTHON=/opt/ebbflow/bin/python
class="$SPARK_HOME/bin/spark-class"

address() { # IMDSv2: a token first
  local token
  token=$(curl -sSf --max-time 5 --retry 3 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' \
    http://169.254.169.254/latest/api/token)
  curl -sSf --max-time 5 --retry 3 -H "X-aws-ec2-metadata-token: $token" \
    http://169.254.169.254/latest/meta-data/local-ipv4
}

secret() {
  export AWS_DEFAULT_REGION=$EBBFLOW_REGION
  aws secretsmanager get-secret-value --secret-id "$EBBFLOW_SPARK_SECRET" --query SecretString --output text
}

make_up() { # the first master makes up the secret, so that it is in no state file
  local problem
  if problem=$(secret 2>&1 > /dev/null); then return; fi
  case "$problem" in
    *ResourceNotFoundException*) ;;
    *) # a secret that cannot be read now must not be replaced
      echo "$problem" >&2
      exit 1
      ;;
  esac
  aws secretsmanager put-secret-value --region "$EBBFLOW_REGION" --secret-id "$EBBFLOW_SPARK_SECRET" --secret-string file:///dev/stdin \
    < <(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n') > /dev/null
}

settings() { # for this user alone, and on no command line
  local found
  for _ in $(seq 60); do # the master makes it up, perhaps only now
    if found=$(secret 2> /dev/null); then break; fi
    sleep 10
  done
  found=$(secret | tr -d '\n')
  [ -n "$found" ]
  (
    umask 077
    mkdir -p "$SPARK_CONF_DIR"
    new=$(mktemp "$SPARK_CONF_DIR/.new.XXXXXX")
    {
      cat /etc/ebbflow/spark/spark-defaults.conf
      echo "spark.authenticate.secret $found"
    } > "$new"
    mv -f "$new" "$SPARK_CONF_DIR/spark-defaults.conf"
  )
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
  conf) settings ;;
  master)
    make_up
    settings
    host=$(address)
    export SPARK_LOCAL_IP=$host
    export SPARK_MASTER_OPTS="-Dspark.deploy.recoveryMode=FILESYSTEM -Dspark.deploy.recoveryDirectory=/var/lib/ebbflow/spark/recovery"
    exec "$class" org.apache.spark.deploy.master.Master --host "$host" --port 7077 --webui-port 8080
    ;;
  history-server)
    settings
    SPARK_LOCAL_IP=$(address)
    export SPARK_LOCAL_IP
    export SPARK_HISTORY_OPTS="-Dspark.history.fs.logDirectory=$EBBFLOW_SPARK_EVENTS -Dspark.history.ui.port=18080"
    exec "$class" org.apache.spark.deploy.history.HistoryServer
    ;;
  worker)
    settings
    host=$(address)
    # its pages show the logs of all applications and know no users: they stay on this machine
    export SPARK_LOCAL_IP=127.0.0.1 SPARK_WORKER_OPTS="-Dspark.decommission.enabled=true -Dspark.worker.cleanup.enabled=true"
    # the kernel's and the agent's share stays free: 1 GiB, or an eighth where that is more
    total=$(awk '/^MemTotal:/ { print int($2 / 1024) }' /proc/meminfo)
    kept=$((total / 8 > 1024 ? total / 8 : 1024))
    exec "$class" org.apache.spark.deploy.worker.Worker --host "$host" --webui-port 8081 \
      --memory "$((total - kept))m" --work-dir /var/lib/ebbflow/work "$EBBFLOW_SPARK_MASTER"
    ;;
  *)
    echo "usage: ebbflow-spark start|stop|status|conf|master|history-server|worker" >&2
    exit 2
    ;;
esac
