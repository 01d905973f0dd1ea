"""``python -m benchmarks decisions``: does a farm decide as the policies say, with any number of workers?"""
