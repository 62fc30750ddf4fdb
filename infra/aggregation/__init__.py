"""The aggregation service: aggregators that sum gradients and update parameters for several trainings.

Source: Gu, Chowdhury, Shin, Akella, "Elastic Model Aggregation with Parameter Service", arXiv 2204.03211.
"""
