"""Hypothesis draws the same examples on every machine: a red test is red for everybody.

New examples are looked for with ``pytest --hypothesis-profile=explore``.
"""

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("same")
