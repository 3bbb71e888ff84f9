"""Ratios against peers, measured in one run on one machine; README.md says how to read them."""
