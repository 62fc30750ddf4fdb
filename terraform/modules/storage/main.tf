data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

module "naming" {
  source = "../naming"

  cluster    = var.cluster
  account_id = data.aws_caller_identity.current.account_id
  region     = data.aws_region.current.region
  tags       = var.tags
}

locals {
  account = data.aws_caller_identity.current.account_id
  region  = data.aws_region.current.region
  root    = "arn:${data.aws_partition.current.partition}:iam::${local.account}"
  bucket  = "arn:${data.aws_partition.current.partition}:s3:::${module.naming.names.bucket}"

  key_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "AccountDecidesByItsRoles"
        Effect    = "Allow"
        Principal = { AWS = "${local.root}:root" }
        Action    = "kms:*"
        Resource  = "*"
      },
      {
        # by condition instead of as principals, because the roles need not exist yet
        Sid       = "VolumesOfGroupsAndFleets"
        Effect    = "Allow"
        Principal = { AWS = "*" }
        Action    = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
        Resource  = "*"
        Condition = {
          StringEquals = { "kms:CallerAccount" = local.account }
          ArnEquals    = { "aws:PrincipalArn" = local.service_roles }
        }
      },
      {
        Sid       = "VolumesOfGroupsAndFleetsGrants"
        Effect    = "Allow"
        Principal = { AWS = "*" }
        Action    = "kms:CreateGrant"
        Resource  = "*"
        Condition = {
          StringEquals = { "kms:CallerAccount" = local.account }
          ArnEquals    = { "aws:PrincipalArn" = local.service_roles }
          Bool         = { "kms:GrantIsForAWSResource" = "true" }
        }
      },
      {
        Sid       = "NoticesOfEventBridge"
        Effect    = "Allow"
        Principal = { Service = "events.amazonaws.com" }
        Action    = ["kms:Decrypt", "kms:GenerateDataKey"]
        Resource  = "*"
        Condition = {
          StringEquals = { "aws:SourceAccount" = local.account }
          ArnEquals    = { "aws:SourceArn" = [for rule in values(module.naming.names.rules) : "arn:${data.aws_partition.current.partition}:events:${local.region}:${local.account}:rule/${rule}"] }
        }
      },
      {
        Sid       = "FlowLogs"
        Effect    = "Allow"
        Principal = { Service = "logs.${local.region}.amazonaws.com" }
        Action    = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
        Resource  = "*"
        Condition = {
          ArnEquals = { "kms:EncryptionContext:aws:logs:arn" = "arn:${data.aws_partition.current.partition}:logs:${local.region}:${local.account}:log-group:${module.naming.names.log_group}" }
        }
      },
    ]
  })

  service_roles = [
    "${local.root}:role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling",
    "${local.root}:role/aws-service-role/ec2fleet.amazonaws.com/AWSServiceRoleForEC2Fleet",
    "${local.root}:role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot",
  ]

  bucket_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "OnlyEncryptedConnections"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:*"
        Resource  = [local.bucket, "${local.bucket}/*"]
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      },
      {
        Sid       = "OnlyThisKey"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:PutObject"
        Resource  = "${local.bucket}/*"
        # who names no key gets the bucket's own
        Condition = {
          StringNotEquals = { "s3:x-amz-server-side-encryption-aws-kms-key-id" = aws_kms_key.this.arn }
          Null            = { "s3:x-amz-server-side-encryption-aws-kms-key-id" = "false" }
        }
      },
      {
        # whatever a role's own policy says: who runs on a node must not choose what other nodes install as root
        Sid       = "NoNodeWritesPackages"
        Effect    = "Deny"
        Principal = "*"
        Action    = ["s3:PutObject", "s3:PutObjectAcl", "s3:PutObjectTagging", "s3:DeleteObject", "s3:DeleteObjectVersion", "s3:RestoreObject", "s3:ReplicateObject"]
        Resource  = "${local.bucket}/${module.naming.names.packages_prefix}/*"
        Condition = { ArnLike = { "aws:PrincipalArn" = [for role in values(module.naming.names.roles) : "${local.root}:role/${role}"] } }
      },
    ]
  })
}

resource "aws_kms_key" "this" {
  description             = "Everything that the Ebbflow cluster ${var.cluster} keeps"
  enable_key_rotation     = true
  deletion_window_in_days = var.key_deletion_days
  policy                  = local.key_policy

  tags = module.naming.tags
}

resource "aws_kms_alias" "this" {
  name          = module.naming.names.key_alias
  target_key_id = aws_kms_key.this.key_id
}

resource "aws_s3_bucket" "this" {
  #checkov:skip=CKV_AWS_144:checkpoints can be computed again; a copy in another region costs more than they do
  #checkov:skip=CKV_AWS_18:a log of every access would be larger than the checkpoints; CloudTrail data events can be switched on where an audit asks for it
  #checkov:skip=CKV2_AWS_62:nothing waits for new objects; manifests are looked up by name
  bucket        = module.naming.names.bucket
  force_destroy = var.force_destroy

  tags = module.naming.tags
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket = aws_s3_bucket.this.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "this" {
  bucket = aws_s3_bucket.this.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    # one data key for many objects: a stage writes thousands of files
    bucket_key_enabled = true

    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.this.arn
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_bucket.this.id
  policy = local.bucket_policy

  depends_on = [aws_s3_bucket_public_access_block.this]
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    id     = "leftovers"
    status = "Enabled"

    filter {}

    # a node that is taken away leaves its uploads unfinished
    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }

    # versions undo a mistake; Ebbflow deletes old checkpoints itself
    noncurrent_version_expiration {
      noncurrent_days = var.keep_versions_days
    }

    expiration {
      expired_object_delete_marker = true
    }
  }

  rule {
    id     = "spark-events"
    status = "Enabled"

    filter {
      prefix = "${module.naming.names.spark_events_prefix}/"
    }

    expiration {
      days = var.keep_spark_events_days
    }
  }

  dynamic "rule" {
    for_each = var.keep_checkpoints_days == null ? [] : [var.keep_checkpoints_days]

    content {
      id     = "checkpoints"
      status = "Enabled"

      filter {
        prefix = "${module.naming.names.store_prefix}/"
      }

      expiration {
        days = rule.value
      }
    }
  }

  depends_on = [aws_s3_bucket_versioning.this]
}
