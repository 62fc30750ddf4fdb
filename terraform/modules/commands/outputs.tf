output "documents" {
  description = "Names of the Systems Manager documents, by what they do"
  value       = { for document, resource in aws_ssm_document.this : document => resource.name }
}
