variable "cluster" {
  description = "Name of the cluster; part of every name and tag, and unique in the account"
  type        = string

  validation {
    condition     = can(regex("^[a-z](-?[a-z0-9])+$", var.cluster)) && length(var.cluster) >= 3 && length(var.cluster) <= 20
    error_message = "cluster must be 3 to 20 lower-case letters, digits and single dashes, beginning with a letter and not ending with a dash."
  }
}

variable "bucket_arn" {
  description = "ARN of the bucket of checkpoints"
  type        = string

  validation {
    condition     = can(regex("^arn:[a-z-]+:s3:::[^/*]+$", var.bucket_arn))
    error_message = "bucket_arn must be the ARN of one bucket."
  }
}

variable "table_bucket_arns" {
  description = "ARNs of buckets whose objects nodes may read: the tables of queries, the data of trainings"
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.table_bucket_arns : can(regex("^arn:[a-z-]+:s3:::[^/*]+$", arn))])
    error_message = "table_bucket_arns must be ARNs of buckets, without a path or a wildcard."
  }
}

variable "queue_arns" {
  description = "ARNs of the queues that the capacity loop reads: notices and dead letters"
  type        = list(string)
}

variable "subnet_ids" {
  description = "Ids of the subnets on which the capacity loop may start nodes"
  type        = list(string)
}

variable "security_group_ids" {
  description = "Ids of the security groups that nodes may be started with"
  type        = list(string)
}

variable "capacity_principals" {
  description = "ARNs of further users and roles that may act as the capacity loop, such as your own for ebbflow fleet"
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.capacity_principals : can(regex("^arn:[a-z-]+:(iam|sts)::[0-9]{12}:[^*]+$", arn))])
    error_message = "capacity_principals must be ARNs of users or roles without wildcards."
  }
}

variable "permissions_boundary_arn" {
  description = "ARN of a policy that bounds every role; null for none"
  type        = string
  default     = null
}

variable "ledger_secret_arn" {
  description = "ARN of the secret with the ledger's address, which aggregators read; null for none"
  type        = string
  default     = null

  validation {
    condition     = var.ledger_secret_arn == null || can(regex("^arn:[a-z-]+:secretsmanager:[^*]+$", var.ledger_secret_arn))
    error_message = "ledger_secret_arn must be the ARN of one secret."
  }
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
