"""Along which dimension a block is cut for its accumulators: the one whose einsums read least."""

import pytest

from collmm.cutting import Step, cut_dim
from collmm.einsum import Einsum

ROWS, DEPTH, COLUMNS, BATCH = range(4)
MATMUL = Einsum((ROWS, DEPTH), (DEPTH, COLUMNS), (ROWS, COLUMNS))


def step(rows, columns, einsum=MATMUL, batch=1, depth=1024, itemsizes=(2, 2)):
    return Step(einsum, {ROWS: rows, DEPTH: depth, COLUMNS: columns, BATCH: batch}, itemsizes)


@pytest.mark.parametrize(
    ("rows", "columns", "parts", "dim", "wanted"),
    [
        (1024, 8192, 2, 0, 1),  # the wide operand would be read twice
        (8192, 1024, 2, 0, 0),
        (8192, 1024, 2, 1, 0),
        (1024, 1024, 2, 0, 0),  # as much either way: the scattered dimension
        (1024, 8192 + 128, 2, 0, 0),  # a part would end within a tile
        (2, 8192, 4, 0, 0),  # a block of two rows has two accumulators at most
        (4, 8192, 4, 0, 1),
        (1024, 8192, 1, 0, 0),
    ],
)
def test_the_larger_free_dimension_is_cut(rows, columns, parts, dim, wanted):
    assert cut_dim([step(rows, columns)], dim, parts) == wanted


def test_bytes_count_and_not_elements():
    assert cut_dim([step(1024, 2048, itemsizes=(4, 1))], 0, 2) == 0
    assert cut_dim([step(1024, 2048, itemsizes=(1, 4))], 0, 2) == 1


def test_all_einsums_of_a_sum_count():
    steps = [step(1024, 2048), step(1024, 2048, itemsizes=(16, 2))]
    assert cut_dim(steps[:1], 0, 2) == 1
    assert cut_dim(steps, 0, 2) == 0


def test_a_batch_dimension_reads_nothing_twice():
    einsum = Einsum((BATCH, ROWS, DEPTH), (BATCH, DEPTH, COLUMNS), (BATCH, ROWS, COLUMNS))
    assert cut_dim([step(1024, 8192, einsum, batch=4)], 1, 2) == 0
    assert cut_dim([step(1024, 8192, einsum, batch=3)], 1, 2) == 2


def test_what_cutting_reads_is_the_sum_over_the_parts():
    (whole, parts) = step(1024, 8192), 4
    assert whole.read(ROWS, parts) == 2 * (1024 * 1024 + 4 * 1024 * 8192)
    assert whole.read(COLUMNS, parts) == 2 * (4 * 1024 * 1024 + 1024 * 8192)
