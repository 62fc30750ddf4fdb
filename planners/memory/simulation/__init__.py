"""A cluster whose machines lend memory to each other, simulated second by second with the planners that run it."""
