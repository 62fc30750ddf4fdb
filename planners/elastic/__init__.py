"""Over-decomposed elastic execution: causality, schedules, rebalancing and estimates (Litz, USENIX ATC 2018)."""
