"""Penalty ⇄ prior: the prior whose KL a penalty is, and the penalty that a prior makes.

Reference: Wolinski, Charpiat & Ollivier, "Interpreting a penalty as the influence of a Bayesian
prior", 2020.
"""
