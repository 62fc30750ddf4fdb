"""An elastic job as one run: its data, its executors, its end."""
