data "aws_caller_identity" "current" {}

module "naming" {
  source = "../naming"

  cluster = var.cluster
  tags    = var.tags
}

locals {
  names = module.naming.names

  # Events of EC2 carry no tags: whose node it is the reader finds out. Those of groups are asked for by name.
  all_patterns = {
    interruption = {
      source        = ["aws.ec2"]
      "detail-type" = ["EC2 Spot Instance Interruption Warning"]
    }
    rebalance = {
      source        = ["aws.ec2"]
      "detail-type" = ["EC2 Instance Rebalance Recommendation"]
    }
    state = {
      source        = ["aws.ec2"]
      "detail-type" = ["EC2 Instance State-change Notification"]
      detail        = { state = ["running", "stopping", "stopped", "shutting-down", "terminated"] }
    }
    lifecycle = {
      source        = ["aws.autoscaling"]
      "detail-type" = ["EC2 Instance-terminate Lifecycle Action"]
      detail        = { AutoScalingGroupName = var.groups }
    }
    "launch-failed" = {
      source        = ["aws.autoscaling"]
      "detail-type" = ["EC2 Instance Launch Unsuccessful"]
      detail        = { AutoScalingGroupName = var.groups }
    }
    health = {
      source        = ["aws.health"]
      "detail-type" = ["AWS Health Event"]
      detail        = { service = ["EC2"], eventTypeCategory = ["scheduledChange", "issue"] }
    }
    # what nodes say of themselves: AWS promises none of the above to arrive
    node = {
      source        = [{ prefix = local.names.event_source_prefix }]
      "detail-type" = [local.names.node_leaving]
    }
  }

  # an empty list of groups would be an invalid pattern
  patterns = {
    for rule, pattern in local.all_patterns : rule => pattern
    if length(var.groups) > 0 || !contains(["lifecycle", "launch-failed"], rule)
  }

  queue_policies = {
    for name, queue in { notices = aws_sqs_queue.this.arn, dead = aws_sqs_queue.dead.arn } : name => jsonencode({
      Version = "2012-10-17"
      Statement = [
        {
          Sid       = "OnlyTheseRulesSend"
          Effect    = "Allow"
          Principal = { Service = "events.amazonaws.com" }
          Action    = "sqs:SendMessage"
          Resource  = queue
          Condition = {
            ArnEquals    = { "aws:SourceArn" = [for rule in aws_cloudwatch_event_rule.this : rule.arn] }
            StringEquals = { "aws:SourceAccount" = data.aws_caller_identity.current.account_id }
          }
        },
        {
          # a user's or role's own policy could allow it otherwise, and a forged notice drains nodes
          Sid       = "NobodyElseSends"
          Effect    = "Deny"
          Principal = "*"
          Action    = "sqs:SendMessage"
          Resource  = queue
          Condition = { ArnNotEqualsIfExists = { "aws:SourceArn" = [for rule in aws_cloudwatch_event_rule.this : rule.arn] } }
        },
        {
          Sid       = "OnlyEncryptedConnections"
          Effect    = "Deny"
          Principal = "*"
          Action    = "sqs:*"
          Resource  = queue
          Condition = { Bool = { "aws:SecureTransport" = "false" } }
        },
      ]
    })
  }
}

resource "aws_sqs_queue" "this" {
  name                              = local.names.notice_queue
  kms_master_key_id                 = var.kms_key_arn
  kms_data_key_reuse_period_seconds = 300
  receive_wait_time_seconds         = 20
  visibility_timeout_seconds        = var.visibility_timeout
  message_retention_seconds         = var.retention
  redrive_policy = jsonencode({
    deadLetterTargetArn = aws_sqs_queue.dead.arn
    maxReceiveCount     = var.max_receive_count
  })

  tags = merge(module.naming.tags, { Name = local.names.notice_queue })
}

resource "aws_sqs_queue" "dead" {
  name                              = local.names.dead_letter_queue
  kms_master_key_id                 = var.kms_key_arn
  kms_data_key_reuse_period_seconds = 300
  message_retention_seconds         = 1209600

  tags = merge(module.naming.tags, { Name = local.names.dead_letter_queue })
}

resource "aws_sqs_queue_redrive_allow_policy" "dead" {
  queue_url = aws_sqs_queue.dead.id
  redrive_allow_policy = jsonencode({
    redrivePermission = "byQueue"
    sourceQueueArns   = [aws_sqs_queue.this.arn]
  })
}

resource "aws_sqs_queue_policy" "this" {
  for_each = { notices = aws_sqs_queue.this.id, dead = aws_sqs_queue.dead.id }

  queue_url = each.value
  policy    = local.queue_policies[each.key]
}

resource "aws_cloudwatch_event_rule" "this" {
  for_each = local.patterns

  name          = local.names.rules[each.key]
  description   = "Notices of the Ebbflow cluster ${var.cluster}: ${each.value["detail-type"][0]}"
  event_pattern = jsonencode(each.value)

  tags = merge(module.naming.tags, { Name = local.names.rules[each.key] })
}

resource "aws_cloudwatch_event_target" "this" {
  for_each = aws_cloudwatch_event_rule.this

  rule      = each.value.name
  target_id = "notices"
  arn       = aws_sqs_queue.this.arn

  dead_letter_config {
    arn = aws_sqs_queue.dead.arn
  }

  # a warning is worth two minutes; what is older is told by the instance's state
  retry_policy {
    maximum_event_age_in_seconds = 300
    maximum_retry_attempts       = 10
  }
}

resource "aws_cloudwatch_metric_alarm" "dead" {
  count = length(var.alarm_actions) > 0 ? 1 : 0

  alarm_name          = local.names.dead_letter_queue
  alarm_description   = "A notice could not be handled"
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateNumberOfMessagesVisible"
  dimensions          = { QueueName = aws_sqs_queue.dead.name }
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 1
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm_actions

  tags = module.naming.tags
}
