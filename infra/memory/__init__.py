"""Remote memory: the free memory of a cluster's nodes as a tier of the store.

Source: Gu, Lee, Zhang, Chowdhury, Shin, "Efficient Memory Disaggregation with Infiniswap", USENIX NSDI 2017.
"""
