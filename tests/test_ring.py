"""The rings simulated in numpy, for every length from 1 to 17."""

import numpy as np
import pytest

from collmm.ring import (
    Chain,
    GroupChain,
    gather_chains,
    gather_parts,
    gather_permutes,
    gather_sends_written,
    permutation,
    relabelled,
    scatter_parts,
    scatter_permutes,
)

LENGTHS = range(1, 18)


def send(held, chain):
    """What every position holds after one send."""
    after = [None] * len(held)
    for source, destination in chain.permutation:
        assert after[destination] is None
        after[destination] = held[source]
    return after


@pytest.mark.parametrize("two_way", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
def test_every_shard_reaches_every_position_once(n, two_way):
    chains = gather_chains(n, two_way)
    seen = [[p] for p in range(n)]
    for chain in chains:
        held = list(range(n))
        for i in range(1, chain.sends + 1):
            held = send(held, chain)
            for p in range(n):
                assert (p + chain.gathered_offset(i)) % n == held[p]
                seen[p].append(held[p])
    assert all(sorted(shards) == list(range(n)) for shards in seen)


@pytest.mark.parametrize("block", [1, 2, 5, 6])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("two_way", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
def test_every_chunk_of_every_shard_reaches_every_position_once(n, two_way, chunks, block):
    parts = gather_parts(n, two_way, block, chunks)
    seen = np.zeros((n, n, block), int)
    for p in range(n):
        seen[p, p] += 1
    for part in parts:
        held = list(range(n))
        for i in range(1, part.chain.sends + 1):
            held = send(held, part.chain)
            for p in range(n):
                assert (p + part.chain.gathered_offset(i)) % n == held[p]
                seen[p, held[p], part.start : part.start + part.size] += 1
    assert np.all(seen == 1)
    sends = sum(part.chain.sends for part in parts)
    assert sends == gather_permutes(n, block, chunks)
    assert sends == (n - 1) * min(chunks, block)
    assert gather_sends_written(n, two_way, True, block, chunks) == sends
    assert 0 <= gather_sends_written(n, two_way, False, block, chunks) <= sends


@pytest.mark.parametrize("n", LENGTHS[1:])
def test_two_chunks_that_go_both_ways_use_both_alike(n):
    sends = {1: 0, -1: 0}
    for part in gather_parts(n, True, 6, 2):
        sends[part.chain.shift] += part.chain.sends * part.size
    assert sends[1] == sends[-1] == 3 * (n - 1)


@pytest.mark.parametrize("block", [1, 2, 3, 6])
@pytest.mark.parametrize(("two_way", "chains"), [(False, 1), (False, 2), (True, 2), (True, 4)])
@pytest.mark.parametrize("n", LENGTHS)
def test_every_share_is_added_once_and_ends_at_its_owner(n, two_way, chains, block):
    shares = np.random.default_rng(n).integers(-99, 99, (n, n * block))
    result = np.zeros((n, block), int)
    written = np.zeros((n, block), int)
    for part in scatter_parts(n, two_way, block, chains):
        added = np.zeros((n, n), int)
        acc = [np.zeros(part.size, int)] * n
        for i in range(n):
            if i:
                acc = send(acc, part.chain)
            for p in range(n):
                shard = (p + part.chain.scattered_offset(i)) % n
                start = shard * block + part.start
                acc[p] = acc[p] + shares[p, start : start + part.size]
                added[p, shard] += 1
        assert np.all(added == 1)
        result[:, part.start : part.start + part.size] = acc
        written[:, part.start : part.start + part.size] += 1
    assert np.all(written == 1)
    np.testing.assert_array_equal(result, shares.sum(axis=0).reshape(n, block))


GROUPS = [(n, g) for n in LENGTHS for g in range(2, n // 2 + 1) if n % g == 0]


def within_groups(n, g):
    """What every position holds of its group after each send within it, and the chain."""
    chain, held = GroupChain(n, -1, g - 1), list(range(n))
    yield held, chain
    for _ in range(chain.sends):
        held = send(held, chain)
        yield held, chain


@pytest.mark.parametrize("two_way", [False, True])
@pytest.mark.parametrize(("n", "g"), GROUPS)
def test_every_group_s_shards_reach_every_position_once(n, g, two_way):
    groups = [set() for _ in range(n)]
    for i, (held, chain) in enumerate(within_groups(n, g)):
        for p in range(n):
            assert (p + chain.within(p, i)) % n == held[p]
            groups[p].add(held[p])
    assert groups == [set(range(p - p % g, p - p % g + g)) for p in range(n)]
    seen = [[p] for p in range(n)]
    for chain in gather_chains(n, two_way, g):
        held = list(range(n))
        for i in range(1, chain.sends + 1):
            held = send(held, chain)
            for p in range(n):
                assert (p + chain.gathered_offset(i)) % n == held[p]
                assert 0 <= chain.gathered_offset(i) <= n
                seen[p].append(held[p])
    # Of every group the member in the same place, which holds what its group has put together.
    assert all(sorted(x // g for x in held) == list(range(n // g)) for held in seen)
    assert gather_permutes(n, g=g) == n // g - 1 + g - 1


@pytest.mark.parametrize(("two_way", "chains"), [(False, 1), (True, 2), (True, 4)])
@pytest.mark.parametrize(("n", "g"), GROUPS)
def test_every_share_of_a_group_is_added_once_and_ends_at_its_owner(n, g, two_way, chains):
    block = 3
    shares = np.random.default_rng(n).integers(-99, 99, (n, n * block))
    sums = np.zeros((n, g * block), int)
    for part in scatter_parts(n, two_way, block, chains, g):
        acc = [np.zeros(part.size, int)] * n
        for i in range(n // g):
            if i:
                acc = send(acc, part.chain)
            for p in range(n):
                member = (p + part.chain.scattered_offset(i)) % n
                start = member // g * g * block + part.start
                acc[p] = acc[p] + shares[p, start : start + part.size]
        sums[:, part.start : part.start + part.size] = acc
    chain = GroupChain(n, -1, g - 1)
    acc = [np.zeros(block, int)] * n
    for i in range(g):
        if i:
            acc = send(acc, chain)
        for p in range(n):
            slot = (p + chain.within(p, 1 + i)) % g
            acc[p] = acc[p] + sums[p, slot * block : (slot + 1) * block]
    np.testing.assert_array_equal(acc, shares.sum(axis=0).reshape(n, block))


@pytest.mark.parametrize("n", LENGTHS)
def test_offsets_need_one_unsigned_remainder(n):
    for two_way in (False, True):
        for chain in gather_chains(n, two_way):
            offsets = [chain.gathered_offset(i) for i in range(1, chain.sends + 1)]
            assert all(0 <= x <= n for x in offsets)
        for part in scatter_parts(n, two_way, 4, 4):
            assert all(0 <= part.chain.scattered_offset(i) <= n for i in range(n))


@pytest.mark.parametrize("n", LENGTHS)
def test_a_gather_sends_n_minus_1_shards_split_evenly_both_ways(n):
    for two_way in (False, True):
        assert sum(chain.sends for chain in gather_chains(n, two_way)) == gather_permutes(n)
    assert gather_permutes(n) == n - 1
    sends = {chain.shift: chain.sends for chain in gather_chains(n, two_way=True)}
    assert sends.get(-1, 0) - sends.get(+1, 0) == (n % 2 == 0)


@pytest.mark.parametrize(
    ("two_way", "block", "chains", "sizes", "shifts"),
    [
        (False, 6, 1, [6], [-1]),
        (False, 5, 2, [3, 2], [-1, -1]),
        (True, 5, 2, [3, 2], [+1, -1]),
        (True, 8, 4, [2, 2, 2, 2], [+1, -1, +1, -1]),
        (True, 7, 4, [2, 2, 2, 1], [+1, -1, +1, -1]),
        (True, 3, 4, [1, 1, 1], [+1, -1, +1]),
        (True, 1, 4, [1], [-1]),
    ],
)
def test_a_block_is_cut_into_parts_that_travel_in_turn(two_way, block, chains, sizes, shifts):
    parts = scatter_parts(5, two_way, block, chains)
    assert [part.size for part in parts] == sizes
    assert [part.chain.shift for part in parts] == shifts
    assert [part.start for part in parts] == [sum(sizes[:k]) for k in range(len(sizes))]
    assert scatter_permutes(5, block, chains) == sum(part.chain.sends for part in parts)


def test_permutation_is_the_table_of_sends():
    assert permutation(3, +1) == ((0, 1), (1, 2), (2, 0))
    assert permutation(3, -1) == ((0, 2), (1, 0), (2, 1))
    assert Chain(3, -1, 2).permutation == permutation(3, -1)


def test_relabelled_pairs_name_the_same_devices():
    # Axes x=2, y=3; ring positions run over (y, x), the mesh counts over (x, y).
    sizes = {"x": 2, "y": 3}
    pairs = relabelled(permutation(6, +1), ("y", "x"), ("x", "y"), sizes)

    def device(position, axes):
        index = np.unravel_index(position, [sizes[axis] for axis in axes])
        return dict(zip(axes, index, strict=True))

    for (source, destination), (s, d) in zip(permutation(6, +1), pairs, strict=True):
        assert device(source, ("y", "x")) == device(s, ("x", "y"))
        assert device(destination, ("y", "x")) == device(d, ("x", "y"))
    assert relabelled(permutation(6, -1), ("x", "y"), ("x", "y"), sizes) == permutation(6, -1)
