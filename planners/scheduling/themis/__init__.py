"""The policy Themis: auctions by finish-time fairness, leases, leftovers."""
