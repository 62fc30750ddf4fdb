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

  validation {
    condition     = can(cidrnetmask(var.cidr)) && try(tonumber(split("/", var.cidr)[1]) >= 16 && tonumber(split("/", var.cidr)[1]) <= 20, false)
    error_message = "cidr must be an IPv4 range between /16 and /20, such as 10.42.0.0/16."
  }
}

variable "zone_count" {
  description = "How many availability zones to use; more zones, more spot capacity"
  type        = number
  default     = 3

  validation {
    condition     = var.zone_count >= 2 && var.zone_count <= 6 && floor(var.zone_count) == var.zone_count
    error_message = "zone_count must be a whole number from 2 to 6: load balancers and databases need two zones."
  }
}

variable "nat_gateways" {
  description = "one: a single NAT gateway, cheap; per-zone: one a zone, so that the loss of a zone costs the others nothing"
  type        = string
  default     = "one"

  validation {
    condition     = contains(["one", "per-zone"], var.nat_gateways)
    error_message = "nat_gateways must be one or per-zone."
  }
}

variable "interface_endpoints" {
  description = "AWS services reached without the NAT gateway, such as ssm, ssmmessages, sqs, events; each costs by the hour and zone"
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for service in var.interface_endpoints : can(regex("^[a-z][a-z0-9.-]*$", service))])
    error_message = "interface_endpoints must be names of services without com.amazonaws, such as ssm or ecr.api."
  }
}

variable "flow_logs" {
  description = "Keep refused connections for a year"
  type        = bool
  default     = true
}

variable "kms_key_arn" {
  description = "ARN of the KMS key for the flow logs; needed when flow_logs is true"
  type        = string
  default     = null

  validation {
    condition     = !var.flow_logs || var.kms_key_arn != null
    error_message = "kms_key_arn is needed when flow_logs is true."
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

variable "ledger" {
  description = "The ledger's database: the security group that it has, and its port. Who has the security group ledger reaches it; null: no such group"
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

variable "tags" {
  description = "Further tags for everything; those of Ebbflow win"
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for key in keys(var.tags) : !startswith(lower(key), "aws:")])
    error_message = "tags must not begin with aws:, which AWS keeps for itself."
  }
}
