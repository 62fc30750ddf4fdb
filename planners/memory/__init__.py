"""The cluster's free memory as a tier of the store: slabs of data on nodes that have memory to spare.

Source: J. Gu, "Efficient Resource Management for Deep Learning Clusters", PhD thesis, University of Michigan, 2021,
chapter II (Infiniswap); Gu, Lee, Zhang, Chowdhury, Shin, NSDI 2017.
"""
