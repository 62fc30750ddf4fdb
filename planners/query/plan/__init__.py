"""Plans: trees, cuts into stages, partition ranges, the SQL of a stage."""
