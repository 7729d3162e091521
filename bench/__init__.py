"""Ratios against the deterministic step and against rivals, taken interleaved in one process."""
