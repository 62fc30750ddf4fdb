"""The decisions of the capacity loop: who holds which GPU until when, how many nodes there are to be, and why."""
