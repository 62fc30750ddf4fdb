"""Shared aggregation as a service: tensors of many trainings packed on few aggregators, and moved between them.

Source: J. Gu, "Efficient Resource Management for Deep Learning Clusters", PhD thesis, University of Michigan, 2021,
chapter IV (Parameter Service, implemented as AutoPS); Gu, Chowdhury, Shin, Akella, arXiv 2204.03211.
"""
