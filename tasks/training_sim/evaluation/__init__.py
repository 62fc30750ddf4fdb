"""The published evaluations of GPU schedulers made again: experiments, and the pages that compare the figures."""
