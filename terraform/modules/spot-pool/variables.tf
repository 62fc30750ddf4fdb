variable "cluster" {
  description = "Name of the cluster; part of every name and tag, and unique in the account"
  type        = string

  validation {
    condition     = can(regex("^[a-z](-?[a-z0-9])+$", var.cluster)) && length(var.cluster) >= 3 && length(var.cluster) <= 20
    error_message = "cluster must be 3 to 20 lower-case letters, digits and single dashes, beginning with a letter and not ending with a dash."
  }
}

variable "name" {
  description = "Name of the pool"
  type        = string

  validation {
    condition     = can(regex("^[a-z](-?[a-z0-9])+$", var.name)) && length(var.name) <= 20
    error_message = "name must be 2 to 20 lower-case letters, digits and single dashes, beginning with a letter and not ending with a dash."
  }
}

variable "kind" {
  description = "spark: Spark workers; gpu: trainers; cpu: aggregators of trainings"
  type        = string
  default     = "spark"

  validation {
    condition     = contains(["spark", "gpu", "cpu"], var.kind)
    error_message = "kind must be spark, gpu or cpu."
  }
}

variable "instance_types" {
  description = "Instance types that will do, all of one architecture; the more, the more spot capacity"
  type        = list(string)

  validation {
    condition     = length(var.instance_types) > 0 && length(var.instance_types) <= 40 && length(distinct(var.instance_types)) == length(var.instance_types) && alltrue([for type in var.instance_types : can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", type))])
    error_message = "instance_types must be 1 to 40 different types, such as m6i.xlarge."
  }
}

variable "architecture" {
  description = "Architecture of the instance types: x86_64 or arm64"
  type        = string
  default     = "x86_64"

  validation {
    condition     = contains(["x86_64", "arm64"], var.architecture)
    error_message = "architecture must be x86_64 or arm64."
  }
}

variable "subnet_ids" {
  description = "Ids of private subnets, one a zone"
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) > 0
    error_message = "subnet_ids must name at least one subnet."
  }
}

variable "security_group_ids" {
  description = "Ids of the nodes' security groups"
  type        = list(string)

  validation {
    condition     = length(var.security_group_ids) > 0
    error_message = "security_group_ids must name at least one group."
  }
}

variable "instance_profile" {
  description = "Name of the nodes' instance profile"
  type        = string
}

variable "min_size" {
  description = "Fewest nodes"
  type        = number
  default     = 0

  validation {
    condition     = var.min_size >= 0 && floor(var.min_size) == var.min_size
    error_message = "min_size must be a whole number and at least 0."
  }
}

variable "max_size" {
  description = "Most nodes, whatever the capacity loop wants"
  type        = number
  default     = 10

  validation {
    condition     = var.max_size >= var.min_size && floor(var.max_size) == var.max_size
    error_message = "max_size must be a whole number and at least min_size."
  }
}

variable "initial_size" {
  description = "Nodes to begin with; afterwards the capacity loop decides"
  type        = number
  default     = 0

  validation {
    condition     = var.initial_size >= var.min_size && var.initial_size <= var.max_size
    error_message = "initial_size must be between min_size and max_size."
  }
}

variable "on_demand_base" {
  description = "Nodes that are always on-demand"
  type        = number
  default     = 0

  validation {
    condition     = var.on_demand_base >= 0 && var.on_demand_base <= var.max_size && floor(var.on_demand_base) == var.on_demand_base
    error_message = "on_demand_base must be a whole number between 0 and max_size."
  }
}

variable "on_demand_percentage_above_base" {
  description = "Percentage of on-demand nodes above the base"
  type        = number
  default     = 0

  validation {
    condition     = var.on_demand_percentage_above_base >= 0 && var.on_demand_percentage_above_base <= 100
    error_message = "on_demand_percentage_above_base must be between 0 and 100."
  }
}

variable "max_spot_price" {
  description = "Highest price for a spot node, in dollars per hour; null for the on-demand price"
  type        = string
  default     = null

  validation {
    condition     = var.max_spot_price == null || try(tonumber(var.max_spot_price) > 0, false)
    error_message = "max_spot_price must be a number of dollars above 0, such as \"0.45\", or null."
  }
}

variable "capacity_rebalance" {
  description = "Let the group replace nodes that are likely to be interrupted soon"
  type        = bool
  default     = true
}

variable "ami_id" {
  description = "Image, Amazon Linux 2023; pins the operating system, Java and the GPU drivers. Null takes the newest"
  type        = string
  default     = null

  validation {
    condition     = var.ami_id == null || can(regex("^ami-[0-9a-f]{8,17}$", var.ami_id))
    error_message = "ami_id must be the id of an image, such as ami-0123456789abcdef0, or null."
  }
}

variable "ami_ssm_parameter" {
  description = "Public Systems Manager parameter that names the image when ami_id is null; null for Amazon Linux 2023, with NVIDIA's drivers for gpu"
  type        = string
  default     = null

  validation {
    condition     = var.ami_ssm_parameter == null || can(regex("^/[A-Za-z0-9_./-]+$", var.ami_ssm_parameter))
    error_message = "ami_ssm_parameter must be a parameter's path."
  }
}

variable "root_device_name" {
  description = "Name of the image's root device"
  type        = string
  default     = "/dev/xvda"
}

variable "root_volume" {
  description = "Root volume, gp3: size in GiB (60 for spark, 120 for gpu, 20 for cpu unless given), iops, throughput in MiB/s. It holds shuffle files, too"
  type = object({
    size       = optional(number)
    iops       = optional(number, 3000)
    throughput = optional(number, 125)
  })
  default = {}

  validation {
    condition     = coalesce(var.root_volume.size, 120) >= (var.kind == "gpu" ? 75 : 20) && coalesce(var.root_volume.size, 120) <= 16384
    error_message = "root_volume.size must be between 20 and 16384 GiB, and at least 75 for gpu, whose image is as large."
  }

  validation {
    condition     = var.root_volume.iops >= 3000 && var.root_volume.iops <= 16000 && var.root_volume.throughput >= 125 && var.root_volume.throughput <= 1000
    error_message = "root_volume.iops must be between 3000 and 16000, throughput between 125 and 1000."
  }
}

variable "placement_group" {
  description = "Name of a placement group, for gangs that exchange much; null for none"
  type        = string
  default     = null
}

variable "detailed_monitoring" {
  description = "Metrics every minute instead of every five, at a price"
  type        = bool
  default     = true
}

variable "spark_master" {
  description = "URL of the Spark master; needed by kind spark"
  type        = string
  default     = null
}

variable "spark_secret_arn" {
  description = "ARN of the secret by which Spark's processes know each other; needed by kind spark"
  type        = string
  default     = null
}

variable "drain_on_rebalance" {
  description = "Drain at a rebalance recommendation already, instead of taking note of it"
  type        = bool
  default     = false
}

variable "drain_seconds" {
  description = "Seconds for which a node that the group ends may drain"
  type        = number
  default     = 120

  validation {
    condition     = var.drain_seconds >= 30 && var.drain_seconds <= 7170 && floor(var.drain_seconds) == var.drain_seconds
    error_message = "drain_seconds must be a whole number from 30 to 7170."
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
  description = "ARN of the secret with the address of the ledger, postgresql://...; needed by kind cpu"
  type        = string
  default     = null
}

variable "aggregation_cluster" {
  description = "Name in the ledger of the cluster whose trainings nodes of kind cpu serve; null for cluster"
  type        = string
  default     = null
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
