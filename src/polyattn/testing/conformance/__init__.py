"""The checks, one file an area; :mod:`polyattn.testing` says how to run them."""
