"""PostgreSQL: the only package whose SQL runs on a farm. One module per aggregate; each query a named function.

Functions take a ``sqlalchemy.Connection`` first, leave the transaction to the caller and return domain values.
"""
