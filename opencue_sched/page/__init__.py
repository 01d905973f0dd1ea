"""The farm page: what a wrangler watches in a browser, served by Flower."""
