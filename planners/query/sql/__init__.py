"""SQL text to one qualified query: parsing, predicates, the join graph, dialects."""
