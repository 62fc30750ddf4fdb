# What a plan without AWS needs to know of it. Everything else that AWS decides is made up by terraform test.

mock_data "aws_caller_identity" {
  defaults = { account_id = "123456789012" }
}

mock_data "aws_partition" {
  defaults = { partition = "aws" }
}

mock_data "aws_region" {
  defaults = { region = "us-east-1" }
}

mock_data "aws_availability_zones" {
  defaults = { names = ["us-east-1a", "us-east-1b", "us-east-1c"] }
}

mock_data "aws_ssm_parameter" {
  defaults = { value = "ami-0123456789abcdef0" }
}

mock_resource "aws_kms_key" {
  defaults = {
    arn    = "arn:aws:kms:us-east-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    key_id = "11111111-2222-3333-4444-555555555555"
  }
}

mock_resource "aws_sqs_queue" {
  defaults = {
    arn = "arn:aws:sqs:us-east-1:123456789012:mock"
    url = "https://sqs.us-east-1.amazonaws.com/123456789012/mock"
    id  = "https://sqs.us-east-1.amazonaws.com/123456789012/mock"
  }
}

mock_resource "aws_iam_role" {
  defaults = { arn = "arn:aws:iam::123456789012:role/mock" }
}

mock_resource "aws_launch_template" {
  defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
}

mock_resource "aws_db_instance" {
  defaults = {
    endpoint = "mock.us-east-1.rds.amazonaws.com:5432"
    master_user_secret = [{
      kms_key_id    = "arn:aws:kms:us-east-1:123456789012:key/11111111-2222-3333-4444-555555555555"
      secret_arn    = "arn:aws:secretsmanager:us-east-1:123456789012:secret:rds-mock"
      secret_status = "active"
    }]
  }
}

mock_resource "aws_secretsmanager_secret" {
  defaults = { arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:mock" }
}
