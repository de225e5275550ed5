"""The decomposed loops, one file per collective; they run inside ``shard_map``."""

from collmm.loops.exchange import all_to_all_einsum, einsum_all_to_all
from collmm.loops.gather import Consumer, all_gather_einsum
from collmm.loops.nested import Inner, nested_gather_einsum, nested_reduce_scatter
from collmm.loops.partial import PartialEinsum
from collmm.loops.scatter import Term, einsum_reduce_scatter

__all__ = [
    "Consumer",
    "Inner",
    "PartialEinsum",
    "Term",
    "all_gather_einsum",
    "all_to_all_einsum",
    "einsum_all_to_all",
    "einsum_reduce_scatter",
    "nested_gather_einsum",
    "nested_reduce_scatter",
]
