"""Derivatives that ``backward()`` does not give: per-example squares, Jacobians, second order."""
