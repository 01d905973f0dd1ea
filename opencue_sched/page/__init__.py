"""The farm page: what a wrangler watches in a browser, served by Flower.

Also the guards that keep an unsafe Flower from starting. What the page says comes from insight/.
"""
