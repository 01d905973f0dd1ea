"""Chaos under load: a whole fleet at work while its processes and stores are killed, frozen, cut off and changed."""
