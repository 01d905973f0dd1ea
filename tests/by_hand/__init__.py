"""Tests that no suite runs, each with a make target: what they need (an older commit, a container engine) is not
everywhere."""
