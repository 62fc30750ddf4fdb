provider "aws" {
  region = var.region

  default_tags {
    tags = { Owner = var.owner }
  }
}

module "ebbflow" {
  source = "../../"

  cluster             = var.cluster
  capacity_principals = var.capacity_principals
  table_bucket_arns   = var.table_bucket_arns
  alarm_actions       = var.alarm_actions
  tags                = { CostCentre = var.cost_centre }

  cidr                = "10.64.0.0/16"
  zone_count          = 3
  nat_gateways        = "per-zone"
  interface_endpoints = ["ssm", "ssmmessages", "ec2messages", "sqs"]

  # nodes' agents serve /metrics to Prometheus on a node of the cluster
  agent_metrics_port = 9466

  # each node of a pool lends up to so many GiB of its free memory to the others
  memory_lend = 2

  spark_master = {
    instance_type = "m6i.large"
    ami_id        = var.ami_id
    volume_size   = 50
  }

  worker_pools = {
    # many types of one size, so that one of them is nearly always to be had
    etl = {
      instance_types = ["m5.2xlarge", "m5a.2xlarge", "m5d.2xlarge", "m6i.2xlarge", "m6a.2xlarge", "m7i.2xlarge", "r5.2xlarge", "r6i.2xlarge"]
      max_size       = 40
      initial_size   = 4
      on_demand_base = 1
      ami_id         = var.ami_id
      root_volume    = { size = 200, iops = 6000, throughput = 500 }
    }
  }

  gpu_pools = {
    trainers = {
      instance_types = ["g5.xlarge", "g6.xlarge", "g4dn.xlarge"]
      max_size       = 16
      drain_seconds  = 300
      ami_id         = var.gpu_ami_id
      root_volume    = { size = 150 }
    }
  }

  # aggregators of trainings, where there is a ledger that they reach
  aggregation = var.ledger_secret_arn == null ? null : { ledger_secret_arn = var.ledger_secret_arn }
  ledger      = var.ledger_security_group_id == null ? null : { security_group_id = var.ledger_security_group_id }
  aggregator_pools = var.ledger_secret_arn == null ? {} : {
    sums = {
      instance_types = ["c6i.2xlarge", "c6a.2xlarge", "c7i.2xlarge", "m6i.2xlarge"]
      max_size       = 8
      ami_id         = var.ami_id
    }
  }

  prefect = {
    host_name       = var.host_name
    certificate_arn = var.certificate_arn
    allowed_cidrs   = var.allowed_cidrs
    worker_count    = 2
    torch_index_url = var.worker_torch_index_url
    ami_id          = var.ami_id
  }

  versions        = { spark = "4.3.0", torch = "2.13.0", prefect = "3.8.8", fastapi = "0.150.0" }
  ebbflow_package = var.ebbflow_package
  ebbflow_sha256  = var.ebbflow_sha256
  constraints     = local.constraints
}

locals {
  # The versions alone: with the hashes of their files they would exceed what a node's configuration may hold. pip
  # takes no extras here.
  constraints = join("\n", flatten([
    for name in ["requirements.lock", "requirements-torch.lock"] : [
      for pin in regexall("(?m)^[a-z0-9][^=\n]*==[^ ]+(?: ; [^\\\\\n]+)?", file("${path.module}/../../../${name}")) :
      replace(pin, "/\\[.*\\]/", "")
    ]
  ]))
}
