variable "cluster" {
  description = "Name of the cluster; part of every name and tag, and unique in the account"
  type        = string

  validation {
    condition     = can(regex("^[a-z](-?[a-z0-9])+$", var.cluster)) && length(var.cluster) >= 3 && length(var.cluster) <= 20
    error_message = "cluster must be 3 to 20 lower-case letters, digits and single dashes, beginning with a letter and not ending with a dash."
  }
}

variable "vpc_id" {
  description = "Id of the VPC"
  type        = string
}

variable "private_subnet_ids" {
  description = "Ids of private subnets in at least two zones"
  type        = list(string)

  validation {
    condition     = length(var.private_subnet_ids) >= 2
    error_message = "private_subnet_ids must be in at least two zones."
  }
}

variable "public_subnet_ids" {
  description = "Ids of public subnets for the load balancer; needed when internal is false"
  type        = list(string)
  default     = []
}

variable "node_security_group_ids" {
  description = "Ids of the nodes' security groups"
  type        = list(string)
}

variable "worker_security_group_ids" {
  description = "Ids of further security groups of the workers, such as that of those that reach the ledger"
  type        = list(string)
  default     = []
}

variable "spark_secret_arn" {
  description = "ARN of the secret that drivers on the workers need for the cluster's Spark; null without Spark"
  type        = string
  default     = null
}

variable "instance_profiles" {
  description = "Names of instance profiles; prefect-server and prefect-worker are used"
  type        = map(string)

  validation {
    condition     = alltrue([for role in ["prefect-server", "prefect-worker"] : contains(keys(var.instance_profiles), role)])
    error_message = "instance_profiles must have prefect-server and prefect-worker."
  }
}

variable "role_names" {
  description = "Names of the roles of these profiles, which are allowed to read the secrets"
  type        = map(string)

  validation {
    condition     = alltrue([for role in ["prefect-server", "prefect-worker"] : contains(keys(var.role_names), role)])
    error_message = "role_names must have prefect-server and prefect-worker."
  }
}

variable "host_name" {
  description = "Name under which people and nodes reach the UI and the API; let it point to the output lb_dns_name"
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)+$", var.host_name))
    error_message = "host_name must be a full name, such as prefect.example.com."
  }
}

variable "certificate_arn" {
  description = "ARN of a certificate of AWS Certificate Manager for host_name"
  type        = string

  validation {
    condition     = can(regex("^arn:[a-z-]+:acm:", var.certificate_arn))
    error_message = "certificate_arn must be the ARN of a certificate of AWS Certificate Manager."
  }
}

variable "internal" {
  description = "Reach the UI from inside the network only; false gives the load balancer public addresses"
  type        = bool
  default     = true
}

variable "allowed_cidrs" {
  description = "IPv4 ranges of people who may reach the UI, besides the cluster's nodes"
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for cidr in var.allowed_cidrs : can(cidrnetmask(cidr)) && cidr != "0.0.0.0/0"])
    error_message = "allowed_cidrs must be IPv4 ranges, and not the whole internet."
  }
}

variable "work_pool" {
  description = "Work pool that the worker serves; made if there is none"
  type        = string
  default     = "ebbflow"
}

variable "server_instance_type" {
  description = "Instance type of the server"
  type        = string
  default     = "t3.small"
}

variable "worker_instance_type" {
  description = "Instance type of the workers, where flows and Spark drivers run"
  type        = string
  default     = "m6i.large"
}

variable "worker_count" {
  description = "How many workers"
  type        = number
  default     = 1

  validation {
    condition     = var.worker_count >= 0 && floor(var.worker_count) == var.worker_count
    error_message = "worker_count must be a whole number and at least 0."
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

variable "ami_id" {
  description = "Image, Amazon Linux 2023; null takes the newest"
  type        = string
  default     = null

  validation {
    condition     = var.ami_id == null || can(regex("^ami-[0-9a-f]{8,17}$", var.ami_id))
    error_message = "ami_id must be the id of an image, such as ami-0123456789abcdef0, or null."
  }
}

variable "postgres_version" {
  description = "Version of PostgreSQL; without a minor version AWS keeps it up to date"
  type        = string
  default     = "17"

  validation {
    condition     = can(regex("^1[4-9](\\.[0-9]+)?$", var.postgres_version))
    error_message = "postgres_version must be 14 or later."
  }
}

variable "database_class" {
  description = "Instance class of the database"
  type        = string
  default     = "db.t4g.micro"

  validation {
    condition     = startswith(var.database_class, "db.")
    error_message = "database_class must begin with db., such as db.t4g.micro."
  }
}

variable "database_multi_az" {
  description = "Keep a second database in another zone"
  type        = bool
  default     = true
}

variable "database_backup_days" {
  description = "Days for which backups are kept"
  type        = number
  default     = 7

  validation {
    condition     = var.database_backup_days >= 1 && var.database_backup_days <= 35
    error_message = "database_backup_days must be between 1 and 35."
  }
}

variable "deletion_protection" {
  description = "Keep terraform destroy from deleting the database and the load balancer"
  type        = bool
  default     = true
}

variable "torch_index_url" {
  description = "A further package index for the workers' torch; without GPUs its small builds for CPUs will do; null for pip's own"
  type        = string
  default     = null
}

variable "memory_dir" {
  description = "s3:// URI of the directory in which lenders of memory and their clients, such as flows, find each other; null: flows use none"
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
