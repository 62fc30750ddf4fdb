output "bucket" {
  description = "Name of the bucket"
  value       = aws_s3_bucket.this.bucket
}

output "bucket_arn" {
  description = "ARN of the bucket"
  value       = local.bucket
}

output "store" {
  description = "URI of the checkpoint store, for --store"
  value       = "s3://${aws_s3_bucket.this.bucket}/${module.naming.names.store_prefix}"
}

output "spark_events" {
  description = "URI of Spark's event logs, as Spark's S3 connector writes it"
  value       = "s3a://${aws_s3_bucket.this.bucket}/${module.naming.names.spark_events_prefix}"
}

output "kms_key_arn" {
  description = "ARN of the key that encrypts everything of the cluster"
  value       = aws_kms_key.this.arn
}
