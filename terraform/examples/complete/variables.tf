variable "cluster" {
  description = "Name of the cluster; part of every name and tag, and unique in the account"
  type        = string
  default     = "prod"
}

variable "region" {
  description = "AWS region"
  type        = string
  default     = "us-east-1"

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region must be a region's name, such as us-east-1."
  }
}

variable "capacity_principals" {
  description = "ARNs of users and roles that may start and end nodes, such as your own"
  type        = list(string)
  default     = []
}

variable "ebbflow_package" {
  description = "s3:// URI of Ebbflow's wheel in the directory packages of the cluster's bucket; ebbflow_sha256 pins what it holds"
  type        = string
}

variable "ebbflow_sha256" {
  description = "SHA-256 of Ebbflow's wheel, in hex: a node installs no other as root"
  type        = string
}

variable "owner" {
  description = "Who answers for the cluster; a tag of everything"
  type        = string
  default     = "data-platform"
}

variable "cost_centre" {
  description = "Who pays for the cluster; a tag of everything"
  type        = string
  default     = "data"
}

variable "table_bucket_arns" {
  description = "ARNs of buckets whose objects nodes may read"
  type        = list(string)
  default     = []
}

variable "alarm_actions" {
  description = "ARNs told when a notice could not be handled, such as an SNS topic's"
  type        = list(string)
  default     = []
}

variable "ami_id" {
  description = "Amazon Linux 2023 of a date that you have tried; null takes the newest"
  type        = string
  default     = null
}

variable "gpu_ami_id" {
  description = "Amazon Linux 2023 with NVIDIA's drivers, of a date that you have tried; null takes the newest"
  type        = string
  default     = null
}

variable "host_name" {
  description = "Name of Prefect's UI and API"
  type        = string
}

variable "certificate_arn" {
  description = "ARN of a certificate of AWS Certificate Manager for host_name"
  type        = string
}

variable "allowed_cidrs" {
  description = "IPv4 ranges, reached through a VPN or peering, from which people use the UI"
  type        = list(string)
  default     = []
}

variable "worker_torch_index_url" {
  description = "A package index with torch's small builds for CPUs, for Prefect's workers; null for pip's own"
  type        = string
  default     = null
}

variable "ledger_secret_arn" {
  description = "ARN of the secret with the ledger's address, for a pool of aggregators; null for none"
  type        = string
  default     = null
}

variable "ledger_security_group_id" {
  description = "Id of the security group of the ledger's database, which aggregators and Prefect's workers then reach; null for none"
  type        = string
  default     = null
}
