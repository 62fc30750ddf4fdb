"""Join orders: enumeration, greedy search, search with a budget."""
