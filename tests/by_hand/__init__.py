"""Tests that a person runs: what they need (an older commit, a container engine) is not everywhere."""
