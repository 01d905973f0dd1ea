"""The demo: a whole farm on this machine renders an animation."""
