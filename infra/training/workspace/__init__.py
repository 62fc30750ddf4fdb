"""The user's code of a training: packed where it is launched, unpacked with its environment once on each node."""
