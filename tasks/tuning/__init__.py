"""One tuning run: request, trials, report; alone or as an app of a cluster."""
