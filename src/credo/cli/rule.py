"""`credo rule`."""

from __future__ import annotations

from credo.cli.options import AsJson


def rule(json: AsJson = False) -> None:
    """Show the learning rule: which choices make which algorithm, and the test that holds it.

    Args:
        json: Print the rows as JSON instead of a table.
    """
    from credo.rule.gallery import table

    table.show(json=json)
