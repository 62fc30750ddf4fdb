"""What the processes of an elastic job send each other, and how."""
