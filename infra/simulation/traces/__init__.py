"""Files that simulations read: jobs, clusters, nodes that come and go, prices."""
