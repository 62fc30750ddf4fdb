mock_provider "aws" {
  source = "../../tests/mocks"
}

variables {
  table_bucket_arns = ["arn:aws:s3:::my-tables"]
}

run "everything" {
  command = apply
}
