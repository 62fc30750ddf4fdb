"""The policy rho-bounded: the most goodput within a bound on finish-time fairness."""
