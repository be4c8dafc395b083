"""Comparing: with recorded digests, with another checkpoint, value by value."""
