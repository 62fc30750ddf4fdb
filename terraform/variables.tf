variable "cluster" {
  description = "Name of the cluster; part of every name and tag, and unique in the account"
  type        = string

  validation {
    condition     = can(regex("^[a-z](-?[a-z0-9])+$", var.cluster)) && length(var.cluster) >= 3 && length(var.cluster) <= 20
    error_message = "cluster must be 3 to 20 lower-case letters, digits and single dashes, beginning with a letter and not ending with a dash."
  }
}

variable "cidr" {
  description = "IPv4 range of the network, /16 to /20"
  type        = string
  default     = "10.42.0.0/16"
}

variable "zone_count" {
  description = "How many availability zones to use; more zones, more spot capacity"
  type        = number
  default     = 3
}

variable "nat_gateways" {
  description = "one or per-zone"
  type        = string
  default     = "one"
}

variable "interface_endpoints" {
  description = "AWS services reached without the NAT gateway, such as ssm, ssmmessages, sqs, events; each costs by the hour and zone"
  type        = list(string)
  default     = []
}

variable "flow_logs" {
  description = "Keep refused connections for a year"
  type        = bool
  default     = true
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

variable "agent_metrics_port" {
  description = "Port of /metrics of the agents of pools' nodes, for Prometheus; null: agents serve none"
  type        = number
  default     = null

  validation {
    condition     = var.agent_metrics_port == null ? true : var.agent_metrics_port >= 1024 && var.agent_metrics_port <= 65535 && floor(var.agent_metrics_port) == var.agent_metrics_port
    error_message = "agent_metrics_port must be a whole number from 1024 to 65535."
  }
}

variable "agent_metrics_cidrs" {
  description = "IPv4 ranges outside of the nodes that Prometheus scrapes agent_metrics_port from; nodes reach each other anyway"
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for range in var.agent_metrics_cidrs : can(cidrnetmask(range))])
    error_message = "agent_metrics_cidrs must be IPv4 ranges such as 10.0.0.0/16."
  }

  validation {
    condition     = length(var.agent_metrics_cidrs) == 0 || var.agent_metrics_port != null
    error_message = "agent_metrics_cidrs goes with agent_metrics_port."
  }
}

variable "detailed_monitoring" {
  description = "Metrics of nodes every minute instead of every five, at a price"
  type        = bool
  default     = true
}

variable "force_destroy" {
  description = "Let terraform destroy delete a bucket that holds checkpoints"
  type        = bool
  default     = false
}

variable "keep_checkpoints_days" {
  description = "Days after which a checkpoint is deleted whatever its use; null leaves that to Ebbflow"
  type        = number
  default     = null
}

variable "table_bucket_arns" {
  description = "ARNs of buckets whose objects nodes may read: the tables of queries, the data of trainings"
  type        = list(string)
  default     = []
}

variable "capacity_principals" {
  description = "ARNs of further users and roles that may act as the capacity loop, such as your own for ebbflow fleet"
  type        = list(string)
  default     = []
}

variable "permissions_boundary_arn" {
  description = "ARN of a policy that bounds every role; null for none"
  type        = string
  default     = null
}

variable "alarm_actions" {
  description = "ARNs told when a notice could not be handled, such as an SNS topic's"
  type        = list(string)
  default     = []
}

variable "spark_master" {
  description = "The Spark master, always on-demand; made when there are worker_pools"
  type = object({
    instance_type = optional(string, "t3.medium")
    architecture  = optional(string, "x86_64")
    volume_size   = optional(number, 20)
    ami_id        = optional(string)
  })
  default = {}
}

variable "worker_pools" {
  description = "Pools of Spark workers by name; empty for no Spark at all. See the module spot-pool"
  type = map(object({
    instance_types                  = list(string)
    architecture                    = optional(string, "x86_64")
    min_size                        = optional(number, 0)
    max_size                        = optional(number, 10)
    initial_size                    = optional(number, 0)
    on_demand_base                  = optional(number, 0)
    on_demand_percentage_above_base = optional(number, 0)
    max_spot_price                  = optional(string)
    capacity_rebalance              = optional(bool, true)
    drain_on_rebalance              = optional(bool, false)
    drain_seconds                   = optional(number, 120)
    ami_id                          = optional(string)
    root_volume = optional(object({
      size       = optional(number)
      iops       = optional(number, 3000)
      throughput = optional(number, 125)
    }), {})
  }))
  default = {}
}

variable "gpu_pools" {
  description = "Pools of GPU trainers by name. See the module spot-pool"
  type = map(object({
    instance_types                  = list(string)
    architecture                    = optional(string, "x86_64")
    min_size                        = optional(number, 0)
    max_size                        = optional(number, 10)
    initial_size                    = optional(number, 0)
    on_demand_base                  = optional(number, 0)
    on_demand_percentage_above_base = optional(number, 0)
    max_spot_price                  = optional(string)
    capacity_rebalance              = optional(bool, true)
    drain_on_rebalance              = optional(bool, false)
    drain_seconds                   = optional(number, 120)
    ami_id                          = optional(string)
    root_volume = optional(object({
      size       = optional(number)
      iops       = optional(number, 3000)
      throughput = optional(number, 125)
    }), {})
  }))
  default = {}

  validation {
    condition     = length(setintersection(keys(var.gpu_pools), keys(var.worker_pools))) == 0
    error_message = "A pool of gpu_pools must not have the name of one of worker_pools."
  }
}

variable "aggregator_pools" {
  description = "Pools of aggregators, to which trainings give their tensors, by name; they need aggregation. See the module spot-pool"
  type = map(object({
    instance_types                  = list(string)
    architecture                    = optional(string, "x86_64")
    min_size                        = optional(number, 0)
    max_size                        = optional(number, 10)
    initial_size                    = optional(number, 0)
    on_demand_base                  = optional(number, 0)
    on_demand_percentage_above_base = optional(number, 0)
    max_spot_price                  = optional(string)
    capacity_rebalance              = optional(bool, true)
    drain_on_rebalance              = optional(bool, false)
    drain_seconds                   = optional(number, 120)
    ami_id                          = optional(string)
    root_volume = optional(object({
      size       = optional(number)
      iops       = optional(number, 3000)
      throughput = optional(number, 125)
    }), {})
  }))
  default = {}

  validation {
    condition     = length(setintersection(keys(var.aggregator_pools), concat(keys(var.worker_pools), keys(var.gpu_pools)))) == 0
    error_message = "A pool of aggregator_pools must not have the name of another pool."
  }

  validation {
    condition     = length(var.aggregator_pools) == 0 || var.aggregation != null
    error_message = "aggregator_pools needs aggregation."
  }
}

variable "aggregation" {
  description = "What aggregators serve: ledger_secret_arn, of a secret that holds the ledger's address (postgresql://...), and the cluster's name in it, cluster unless given"
  type = object({
    ledger_secret_arn = string
    cluster           = optional(string)
  })
  default = null
}

variable "ledger" {
  description = "The ledger's database: the security group that it has, and its port. Aggregators and Prefect's workers reach it then; null: by rules of your own"
  type = object({
    security_group_id = string
    port              = optional(number, 5432)
  })
  default = null

  validation {
    condition     = var.ledger == null ? true : can(regex("^sg-[0-9a-f]{8,17}$", var.ledger.security_group_id))
    error_message = "ledger.security_group_id must be the id of a security group, such as sg-0123456789abcdef0."
  }

  validation {
    condition     = var.ledger == null ? true : var.ledger.port >= 1 && var.ledger.port <= 65535 && floor(var.ledger.port) == var.ledger.port
    error_message = "ledger.port must be a whole number from 1 to 65535."
  }
}

variable "prefect" {
  description = "Prefect's server, database, UI and workers; null to use another server. See the module prefect"
  type = object({
    host_name            = string
    certificate_arn      = string
    internal             = optional(bool, true)
    allowed_cidrs        = optional(list(string), [])
    work_pool            = optional(string, "ebbflow")
    server_instance_type = optional(string, "t3.small")
    worker_instance_type = optional(string, "m6i.large")
    worker_count         = optional(number, 1)
    torch_index_url      = optional(string)
    database_class       = optional(string, "db.t4g.micro")
    database_multi_az    = optional(bool, true)
    deletion_protection  = optional(bool, true)
    ami_id               = optional(string)
  })
  default = null
}

variable "torch_index_url" {
  description = "A further package index for torch's CUDA builds; null for pip's own"
  type        = string
  default     = null
}

variable "ebbflow_package" {
  description = "s3:// URI of Ebbflow's wheel in the directory packages of the cluster's bucket; ebbflow_sha256 pins what it holds"
  type        = string
}

variable "ebbflow_sha256" {
  description = "SHA-256 of Ebbflow's wheel, in hex: a node installs no other as root"
  type        = string
}

variable "constraints" {
  description = "Text of a pip constraints file that pins what the packages need in turn; null for none"
  type        = string
  default     = null
}

variable "versions" {
  description = "Versions of the Python packages that nodes install; what is left out is that of the module node-config"
  type = object({
    spark   = optional(string)
    torch   = optional(string)
    prefect = optional(string)
    fastapi = optional(string)
    boto3   = optional(string)
    psycopg = optional(string)
    optuna  = optional(string)
    pyzmq   = optional(string)
    msgpack = optional(string)
  })
  default = {}
}

variable "tags" {
  description = "Further tags for everything; those of Ebbflow win"
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for key in keys(var.tags) : !startswith(lower(key), "aws:")])
    error_message = "tags must not begin with aws:, which AWS keeps for itself."
  }
}
