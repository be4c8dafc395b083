"""Meshes, partition specs and rules, without devices."""
