"""Remote memory as runs and commands use it: the tier before a store, and the daemons that lend."""
