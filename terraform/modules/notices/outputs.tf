output "queue_url" {
  description = "URL of the notice queue"
  value       = aws_sqs_queue.this.url
}

output "queue_arn" {
  description = "ARN of the notice queue"
  value       = aws_sqs_queue.this.arn
}

output "dead_letter_queue_url" {
  description = "URL of the queue of notices that could not be handled"
  value       = aws_sqs_queue.dead.url
}

output "dead_letter_queue_arn" {
  description = "ARN of the queue of notices that could not be handled"
  value       = aws_sqs_queue.dead.arn
}

output "rules" {
  description = "Names of the EventBridge rules, by kind of event"
  value       = { for kind, rule in aws_cloudwatch_event_rule.this : kind => rule.name }
}
