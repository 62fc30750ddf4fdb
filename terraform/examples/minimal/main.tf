provider "aws" {
  region = var.region
}

# The cheapest cluster on which queries run while spot nodes come and go. Prefect runs elsewhere: on your own machine,
# or wherever PREFECT_API_URL points.
module "ebbflow" {
  source = "../../"

  cluster             = var.cluster
  capacity_principals = var.capacity_principals
  table_bucket_arns   = var.table_bucket_arns

  zone_count          = 2
  nat_gateways        = "one"
  flow_logs           = false
  detailed_monitoring = false
  force_destroy       = true # terraform destroy deletes the checkpoints, too

  spark_master = { instance_type = "t3.medium" }

  worker_pools = {
    workers = {
      instance_types = ["m5.large", "m5a.large", "m6i.large", "m6a.large"]
      max_size       = 4
      initial_size   = 2
      root_volume    = { size = 30 }
    }
  }

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
