"""One training: request, driver, supervisor, report; alone or as an app of a cluster."""
