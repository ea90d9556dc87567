"""A model over HTTP, and a page where you see what it sees.

The event loop only reads and writes; images are decoded by a few threads (`service`), and each model has
a thread of its own (`worker`) that computes whatever has arrived as one batch.
"""
