variable "cluster" {
  description = "Name of the cluster; part of every name and tag, and unique in the account"
  type        = string

  validation {
    condition     = can(regex("^[a-z](-?[a-z0-9])+$", var.cluster)) && length(var.cluster) >= 3 && length(var.cluster) <= 20
    error_message = "cluster must be 3 to 20 lower-case letters, digits and single dashes, beginning with a letter and not ending with a dash."
  }
}

variable "role" {
  description = "What the node does: spark-master, spark-worker, gpu-trainer, aggregator, prefect-server or prefect-worker"
  type        = string

  validation {
    condition     = contains(["spark-master", "spark-worker", "gpu-trainer", "aggregator", "prefect-server", "prefect-worker"], var.role)
    error_message = "role must be spark-master, spark-worker, gpu-trainer, aggregator, prefect-server or prefect-worker."
  }
}

variable "region" {
  description = "AWS region of the node"
  type        = string
}

variable "group" {
  description = "Name of the Auto Scaling group that the node belongs to; null for none"
  type        = string
  default     = null
}

variable "versions" {
  description = "Versions of the Python packages that nodes install"
  type = object({
    spark   = optional(string, "4.3.0")
    torch   = optional(string, "2.13.0")
    prefect = optional(string, "3.8.8")
    fastapi = optional(string, "0.150.0")
    boto3   = optional(string, "1.44.5")
    psycopg = optional(string, "3.3.9")
    optuna  = optional(string, "5.0.0")
    pyzmq   = optional(string, "27.3.0")
    msgpack = optional(string, "1.2.4")
  })
  default = {}

  validation {
    condition     = alltrue([for version in values(var.versions) : can(regex("^[0-9]+(\\.[0-9]+)+([a-z0-9.+]*)$", version))])
    error_message = "versions must be exact, such as 4.3.0."
  }

  validation {
    condition     = can(regex("^4\\.", var.versions.spark))
    error_message = "versions.spark must be 4.x; decommissioning and the planner's statistics rely on it."
  }

  # 0.151 to 0.154 answer the Prefect client with 422; 0.155 and later stop the server from starting
  validation {
    condition     = try(tonumber(split(".", var.versions.fastapi)[1]) >= 139 && tonumber(split(".", var.versions.fastapi)[1]) <= 150, false)
    error_message = "versions.fastapi must be at least 0.139 and less than 0.151, the versions that Prefect's server works with."
  }
}

variable "ebbflow_package" {
  description = "s3:// URI of Ebbflow's wheel in the directory packages of the cluster's bucket; ebbflow_sha256 pins what it holds"
  type        = string

  validation {
    condition     = can(regex("^s3://[a-z0-9][a-z0-9.-]+/packages/[A-Za-z0-9._/+-]+\\.whl$", var.ebbflow_package))
    error_message = "ebbflow_package must be the s3:// URI of a wheel in the directory packages."
  }
}

variable "ebbflow_sha256" {
  description = "SHA-256 of Ebbflow's wheel, in hex: a node installs no other as root"
  type        = string

  validation {
    condition     = can(regex("^[0-9a-f]{64}$", var.ebbflow_sha256))
    error_message = "ebbflow_sha256 must be 64 hexadecimal digits in lower case, as sha256sum prints them."
  }
}

variable "constraints" {
  description = "Text of a pip constraints file that pins what the packages need in turn, such as Ebbflow's requirements.lock; null for none"
  type        = string
  default     = null
}

variable "torch_index_url" {
  description = "A further package index for torch's builds, CUDA's or those for CPUs; null for pip's own"
  type        = string
  default     = null

  validation {
    condition     = var.torch_index_url == null || can(regex("^https://[A-Za-z0-9._/:-]+$", var.torch_index_url))
    error_message = "torch_index_url must begin with https:// and hold no credentials."
  }
}

variable "java_package" {
  description = "Java 17 of the image's distribution; the image's release pins its exact version"
  type        = string
  default     = "java-17-amazon-corretto-headless"

  validation {
    condition     = can(regex("^java-[A-Za-z0-9._+-]+$", var.java_package))
    error_message = "java_package must be the name of a Java package, with or without a version."
  }
}

variable "spark_packages" {
  description = "Maven coordinates that are put among Spark's jars: the S3 connector of Spark's own Hadoop version"
  type        = list(string)
  default     = ["org.apache.hadoop:hadoop-aws:3.5.0"]

  validation {
    condition     = alltrue([for package in var.spark_packages : can(regex("^[A-Za-z0-9._-]+:[A-Za-z0-9._-]+:[A-Za-z0-9._-]+$", package))])
    error_message = "spark_packages must be organisation:module:version."
  }
}

variable "spark_master" {
  description = "URL of the Spark master, spark://host:port; needed by spark-worker"
  type        = string
  default     = null

  validation {
    condition     = var.role != "spark-worker" || can(regex("^spark://[A-Za-z0-9._-]+:[0-9]+$", var.spark_master))
    error_message = "spark_master must be spark://host:port for spark-worker."
  }
}

variable "spark_secret_arn" {
  description = "ARN of the secret by which Spark's processes know each other; needed by spark-master and spark-worker"
  type        = string
  default     = null

  validation {
    condition     = !contains(["spark-master", "spark-worker"], var.role) || can(regex("^arn:[a-z-]+:secretsmanager:", var.spark_secret_arn))
    error_message = "spark_secret_arn must be the ARN of a secret for spark-master and spark-worker."
  }
}

variable "spark_events" {
  description = "s3a:// URI of Spark's event logs; needed by spark-master"
  type        = string
  default     = null

  validation {
    condition     = var.role != "spark-master" || can(regex("^s3a://[^\"$`\\s]+$", var.spark_events))
    error_message = "spark_events must be an s3a:// URI for spark-master."
  }
}

variable "settings_parameter" {
  description = "Systems Manager parameter with the cluster's settings; needed by prefect-worker"
  type        = string
  default     = null

  validation {
    condition     = var.role != "prefect-worker" || can(regex("^/[A-Za-z0-9_./-]+$", var.settings_parameter))
    error_message = "settings_parameter must be a parameter's path for prefect-worker."
  }
}

variable "drain_on_rebalance" {
  description = "Drain at a rebalance recommendation already. Few of them become interruptions, so by default the node only takes note"
  type        = bool
  default     = false
}

variable "drain_seconds" {
  description = "Seconds for which a node that its group ends may drain; a spot interruption sets its own deadline"
  type        = number
  default     = 120

  validation {
    condition     = var.drain_seconds >= 30 && var.drain_seconds <= 7200 && floor(var.drain_seconds) == var.drain_seconds
    error_message = "drain_seconds must be a whole number from 30 to 7200."
  }
}

variable "memory_lend" {
  description = "Most memory that a node of a pool lends to others, GiB; 0: none. It must be drained within a notice: 1 GiB takes 42 s at 200 Mbit/s"
  type        = number
  default     = 0

  validation {
    condition     = var.memory_lend >= 0 && var.memory_lend <= 64 && floor(var.memory_lend) == var.memory_lend
    error_message = "memory_lend must be a whole number from 0 to 64."
  }
}

variable "memory_dir" {
  description = "s3:// URI of the directory in which lenders of memory and their clients find each other; needed where memory_lend is above 0"
  type        = string
  default     = null

  validation {
    condition     = var.memory_dir == null ? var.memory_lend == 0 : can(regex("^s3://[^\"$`\\s]+$", var.memory_dir))
    error_message = "memory_dir must be an s3:// URI where memory_lend is above 0."
  }
}

variable "ledger_secret_arn" {
  description = "ARN of the secret with the address of the ledger, postgresql://...; needed by aggregator"
  type        = string
  default     = null

  validation {
    condition     = var.role != "aggregator" || can(regex("^arn:[a-z-]+:secretsmanager:", var.ledger_secret_arn))
    error_message = "ledger_secret_arn must be the ARN of a secret for aggregator."
  }
}

variable "aggregation_cluster" {
  description = "Name in the ledger of the cluster whose trainings an aggregator serves; null for cluster"
  type        = string
  default     = null

  validation {
    condition     = var.aggregation_cluster == null || can(regex("^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", coalesce(var.aggregation_cluster, "-")))
    error_message = "aggregation_cluster must be letters, digits, dots, dashes and underscores, a letter or digit first, 64 at most."
  }
}

variable "agent_metrics_port" {
  description = "Port of the agent's /metrics, for Prometheus, on all addresses of the node; null: the agent serves none"
  type        = number
  default     = null

  validation {
    condition     = var.agent_metrics_port == null ? true : var.agent_metrics_port >= 1024 && var.agent_metrics_port <= 65535 && floor(var.agent_metrics_port) == var.agent_metrics_port
    error_message = "agent_metrics_port must be a whole number from 1024 to 65535."
  }
}

variable "prefect_api_url" {
  description = "URL of Prefect's API; needed by prefect-server and prefect-worker"
  type        = string
  default     = null

  validation {
    condition     = !startswith(var.role, "prefect-") || can(regex("^https://[A-Za-z0-9.-]+(:[0-9]+)?/api$", var.prefect_api_url))
    error_message = "prefect_api_url must be https://host/api for Prefect's nodes."
  }
}

variable "prefect_work_pool" {
  description = "Work pool that prefect-worker serves"
  type        = string
  default     = null

  validation {
    condition     = var.role != "prefect-worker" || can(regex("^[A-Za-z0-9][A-Za-z0-9 _-]*$", var.prefect_work_pool))
    error_message = "prefect_work_pool must be a name of letters, digits, spaces, dashes and underscores for prefect-worker."
  }
}

variable "prefect_secret_arn" {
  description = "ARN of the secret with Prefect's user:password; needed by prefect-server and prefect-worker"
  type        = string
  default     = null

  validation {
    condition     = !startswith(var.role, "prefect-") || var.prefect_secret_arn != null
    error_message = "prefect_secret_arn is needed by Prefect's nodes."
  }
}

variable "database_secret_arn" {
  description = "ARN of the secret with the database's user and password; needed by prefect-server"
  type        = string
  default     = null

  validation {
    condition     = var.role != "prefect-server" || var.database_secret_arn != null
    error_message = "database_secret_arn is needed by prefect-server."
  }
}

variable "database_address" {
  description = "host:port of the database; needed by prefect-server"
  type        = string
  default     = null

  validation {
    condition     = var.role != "prefect-server" || var.database_address != null
    error_message = "database_address is needed by prefect-server."
  }
}
