"""One query: request, planning, driver, report; alone or as an app of a cluster."""
