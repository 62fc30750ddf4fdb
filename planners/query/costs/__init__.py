"""What a plan costs: operators, sizes, dividing a stage, sampling."""
