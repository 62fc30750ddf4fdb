variable "cluster" {
  description = "Name of the cluster; part of every name and tag, and unique in the account"
  type        = string

  validation {
    condition     = can(regex("^[a-z](-?[a-z0-9])+$", var.cluster)) && length(var.cluster) >= 3 && length(var.cluster) <= 20
    error_message = "cluster must be 3 to 20 lower-case letters, digits and single dashes, beginning with a letter and not ending with a dash."
  }
}

variable "subnet_ids" {
  description = "Ids of private subnets, one a zone; the master is in the first"
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) > 0
    error_message = "subnet_ids must name at least one subnet."
  }
}

variable "subnet_cidrs" {
  description = "IPv4 ranges of these subnets, in the same order"
  type        = list(string)

  validation {
    condition     = length(var.subnet_cidrs) == length(var.subnet_ids)
    error_message = "subnet_cidrs must have one range for each of subnet_ids."
  }
}

variable "security_group_ids" {
  description = "Ids of the nodes' security groups"
  type        = list(string)
}

variable "instance_profile" {
  description = "Name of the nodes' instance profile"
  type        = string
}

variable "role_names" {
  description = "Names of the nodes' roles, by what the node does; node and, where it is there, prefect-worker may read Spark's secret"
  type        = map(string)

  validation {
    condition     = contains(keys(var.role_names), "node")
    error_message = "role_names must have node."
  }
}

variable "master_instance_type" {
  description = "Instance type of the master, which runs the history server, too"
  type        = string
  default     = "t3.medium"
}

variable "master_architecture" {
  description = "Architecture of master_instance_type: x86_64 or arm64"
  type        = string
  default     = "x86_64"

  validation {
    condition     = contains(["x86_64", "arm64"], var.master_architecture)
    error_message = "master_architecture must be x86_64 or arm64."
  }
}

variable "master_volume_size" {
  description = "Size of the master's root volume, GiB"
  type        = number
  default     = 20

  validation {
    condition     = var.master_volume_size >= 20
    error_message = "master_volume_size must be at least 20 GiB."
  }
}

variable "ami_id" {
  description = "The master's image, Amazon Linux 2023; null takes the newest when the master is made"
  type        = string
  default     = null

  validation {
    condition     = var.ami_id == null || can(regex("^ami-[0-9a-f]{8,17}$", var.ami_id))
    error_message = "ami_id must be the id of an image, such as ami-0123456789abcdef0, or null."
  }
}

variable "spark_events" {
  description = "s3a:// URI of the event logs that the history server shows"
  type        = string
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

variable "agent_metrics_port" {
  description = "Port of /metrics of the agents of pools' nodes, for Prometheus; null: agents serve none"
  type        = number
  default     = null

  validation {
    condition     = var.agent_metrics_port == null ? true : var.agent_metrics_port >= 1024 && var.agent_metrics_port <= 65535 && floor(var.agent_metrics_port) == var.agent_metrics_port
    error_message = "agent_metrics_port must be a whole number from 1024 to 65535."
  }
}

variable "detailed_monitoring" {
  description = "Metrics every minute instead of every five, at a price"
  type        = bool
  default     = true
}

variable "worker_pools" {
  description = "Pools of workers by name; see the module spot-pool"
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

variable "kms_key_arn" {
  description = "ARN of the KMS key that encrypts what this module keeps"
  type        = string

  validation {
    condition     = can(regex("^arn:[a-z-]+:kms:", var.kms_key_arn))
    error_message = "kms_key_arn must be the ARN of a KMS key."
  }
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
