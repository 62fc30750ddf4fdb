variable "cluster" {
  description = "Name of the cluster; part of every name and tag, and unique in the account"
  type        = string
  default     = "lab"
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

variable "table_bucket_arns" {
  description = "ARNs of buckets whose objects nodes may read: the tables of your queries"
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
