"""Overlap collectives with the einsums that need them, in JAX."""
