variable "cluster" {
  description = "Name of the cluster; part of every name and tag, and unique in the account"
  type        = string

  validation {
    condition     = can(regex("^[a-z](-?[a-z0-9])+$", var.cluster)) && length(var.cluster) >= 3 && length(var.cluster) <= 20
    error_message = "cluster must be 3 to 20 lower-case letters, digits and single dashes, beginning with a letter and not ending with a dash."
  }
}

variable "force_destroy" {
  description = "Let terraform destroy delete a bucket that holds checkpoints"
  type        = bool
  default     = false
}

variable "key_deletion_days" {
  description = "Days in which the deletion of the key can be taken back"
  type        = number
  default     = 30

  validation {
    condition     = var.key_deletion_days >= 7 && var.key_deletion_days <= 30
    error_message = "key_deletion_days must be between 7 and 30."
  }
}

variable "keep_versions_days" {
  description = "Days for which deleted and overwritten objects can be brought back"
  type        = number
  default     = 7

  validation {
    condition     = var.keep_versions_days >= 1
    error_message = "keep_versions_days must be at least 1."
  }
}

variable "keep_spark_events_days" {
  description = "Days for which the history server can show an application"
  type        = number
  default     = 30

  validation {
    condition     = var.keep_spark_events_days >= 1
    error_message = "keep_spark_events_days must be at least 1."
  }
}

variable "keep_checkpoints_days" {
  description = "Days after which a checkpoint is deleted whatever its use; null leaves that to Ebbflow, which deletes the least recently used"
  type        = number
  default     = null

  validation {
    condition     = var.keep_checkpoints_days == null || coalesce(var.keep_checkpoints_days, 1) >= 1
    error_message = "keep_checkpoints_days must be at least 1, or null."
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
