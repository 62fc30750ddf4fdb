variable "cluster" {
  description = "Name of the cluster; part of every name and tag, and unique in the account"
  type        = string

  validation {
    condition     = can(regex("^[a-z](-?[a-z0-9])+$", var.cluster)) && length(var.cluster) >= 3 && length(var.cluster) <= 20
    error_message = "cluster must be 3 to 20 lower-case letters, digits and single dashes, beginning with a letter and not ending with a dash."
  }
}

variable "groups" {
  description = "Names of the Auto Scaling groups whose terminations and failed launches are told"
  type        = list(string)
  default     = []
}

variable "visibility_timeout" {
  description = "Seconds for which a notice that is being handled is hidden from other readers"
  type        = number
  default     = 30

  validation {
    condition     = var.visibility_timeout >= 5 && var.visibility_timeout <= 120
    error_message = "visibility_timeout must be between 5 and 120 seconds: a warning is worth two minutes."
  }
}

variable "retention" {
  description = "Seconds for which an unread notice is kept"
  type        = number
  default     = 3600

  validation {
    condition     = var.retention >= 300 && var.retention <= 1209600
    error_message = "retention must be between 300 and 1209600 seconds."
  }
}

variable "max_receive_count" {
  description = "How often a notice may be received before it goes to the dead letters"
  type        = number
  default     = 5

  validation {
    condition     = var.max_receive_count >= 1 && var.max_receive_count <= 1000
    error_message = "max_receive_count must be between 1 and 1000."
  }
}

variable "alarm_actions" {
  description = "ARNs told when a notice becomes a dead letter, such as an SNS topic's; empty for no alarm"
  type        = list(string)
  default     = []
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
