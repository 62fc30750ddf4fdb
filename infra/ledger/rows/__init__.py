"""The ledger's rows: values as JSON and back, and the current state that events add up to."""
