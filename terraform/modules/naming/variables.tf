variable "cluster" {
  description = "Name of the cluster; part of every name and tag, and unique in the account"
  type        = string

  validation {
    condition     = can(regex("^[a-z](-?[a-z0-9])+$", var.cluster)) && length(var.cluster) >= 3 && length(var.cluster) <= 20
    error_message = "cluster must be 3 to 20 lower-case letters, digits and single dashes, beginning with a letter and not ending with a dash."
  }
}

variable "managed" {
  description = "Who starts and ends the resource: loop (the capacity loop) or terraform"
  type        = string
  default     = "terraform"

  validation {
    condition     = contains(["loop", "terraform"], var.managed)
    error_message = "managed must be loop or terraform."
  }
}

variable "role" {
  description = "What a node does; null for what is no node"
  type        = string
  default     = null

  validation {
    condition     = var.role == null || contains(["spark-master", "spark-worker", "gpu-trainer", "aggregator", "prefect-server", "prefect-worker"], coalesce(var.role, "-"))
    error_message = "role must be spark-master, spark-worker, gpu-trainer, aggregator, prefect-server or prefect-worker."
  }
}

variable "pool" {
  description = "Name of the spot pool; null for what belongs to none"
  type        = string
  default     = null

  validation {
    condition     = var.pool == null || (can(regex("^[a-z](-?[a-z0-9])+$", var.pool)) && length(coalesce(var.pool, "-")) <= 20 && !contains(["spark-master", "spark-worker", "gpu-trainer", "aggregator", "prefect-server", "prefect-worker"], coalesce(var.pool, "-")))
    error_message = "pool must be 2 to 20 lower-case letters, digits and single dashes, beginning with a letter, not ending with a dash, and not the name of a role."
  }
}

variable "account_id" {
  description = "AWS account, needed only for the bucket's name"
  type        = string
  default     = ""
}

variable "region" {
  description = "AWS region, needed only for the bucket's name"
  type        = string
  default     = ""
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
