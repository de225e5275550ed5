"""Reading optimized HLO text: parsing, collectives and their overlap. Pure Python, no jax."""

from collmm.hlo.collectives import CollectiveCount, summarize
from collmm.hlo.parse import Module, parse

__all__ = ["CollectiveCount", "Module", "parse", "summarize"]
