"""Algorithms that the Bayesian learning rule derives, one short file each; `credo rule` lists them.

Nothing here is needed to train a network. It is the theory as running code: each file derives its
algorithm from `credo.rule`, says what it gives up, and names the test that holds it equal to the
algorithm everybody knows.
"""
