"""Why there are two layers: what the content checksum cannot see, and that the storage hash does.

The content checksum is a linear sum mod 2**64 with odd weights. That makes it cheap on a device, additive over
blocks, layers, heads and ranks, and certain to show any change inside one piece. It also lets changes cancel: two
flips of bit 63 are 2**63 + 2**63 = 0, and a piece of zeros adds nothing. Such patterns are no curiosity: a damaged
bit in a compressed frame is copied to many places at regular distances, and some wrong decodings pass the sum.

So the stored bytes carry a second, non-linear hash (XXH3-64, bound to the key, checked before decoding). It cannot
replace the sum either: it never sees the engine's own cache. Each test here makes bytes that are wrong, shows that
the sum calls them right, and shows that XXH3-64 does not. Whoever thinks of deleting the storage hash as redundant
deletes the only thing that sees these. If a test fails because the sum now does see the damage, the definition has
changed, and with it every stored checksum.

The reasons and the measured shares are in docs/checksum.md, section 10.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvstore.checksum import block_checksum_tags, reference_block_checksum, reference_slice_checksum, slice_factor

Pieces = npt.NDArray[np.uint64]
TOKENS, CELL_PIECES = 128, 64
SLICES = [(0, 0), (0, 1), (5, 2)]
FIRST_TOKEN = 256
PAGE_PIECES = 512
TOP = np.uint64(2**63)


def make_block(seed: int, tokens: int = TOKENS, cell_pieces: int = CELL_PIECES) -> Pieces:
    """(slices, tokens, pieces of a cell), slices of 64 KiB unless told otherwise."""
    return np.random.default_rng(seed).integers(0, 2**64, (len(SLICES), tokens, cell_pieces), np.uint64)


def content_checksum(block: Pieces, first_token: int = FIRST_TOKEN) -> int:
    cells = block.astype("<u8").view(np.uint8)
    return reference_block_checksum(
        (*part, reference_slice_checksum(cells[i], first_token)) for i, part in enumerate(SLICES)
    )


def storage_hash(block: Pieces) -> int:
    return xxhash.xxh3_64_intdigest(block.astype("<u8").tobytes())


def assert_only_the_storage_hash_sees(good: Pieces, bad: Pieces, first_token: int = FIRST_TOKEN) -> None:
    assert good.shape != bad.shape or not np.array_equal(good, bad)
    assert content_checksum(bad, first_token) == content_checksum(good, first_token)
    assert storage_hash(bad) != storage_hash(good)


def assert_both_see(good: Pieces, bad: Pieces) -> None:
    assert content_checksum(bad) != content_checksum(good)
    assert storage_hash(bad) != storage_hash(good)


# --- blind spots: the sum is equal, the bytes are not --------------------------------------------------------------


@pytest.mark.parametrize("flips", [2, 4, 100, 5000])
def test_even_number_of_sign_flips(flips: int) -> None:
    """Bit 63 of a piece is the sign of every 4th bf16: each flip adds 2**63, whatever its odd weight."""
    good = make_block(flips)
    where = np.random.default_rng(flips + 1).choice(good.size, flips, replace=False)
    bad = good.copy()
    bad.reshape(-1)[where] ^= TOP
    assert_only_the_storage_hash_sees(good, bad)
    bad.reshape(-1)[where[0]] ^= TOP
    assert_both_see(good, bad)


def test_every_sign_flipped() -> None:
    """The whole lane inverted: as wrong as KV can be, and the sum does not move."""
    good = make_block(1)
    assert_only_the_storage_hash_sees(good, good ^ TOP)


@pytest.mark.parametrize("seed", range(20))
def test_two_words_swapped_that_differ_in_the_sign(seed: int) -> None:
    """The change is (w1 - w2)*2**63, and a difference of odd weights is even: any two places, any two slices."""
    good = make_block(seed)
    one, two = np.random.default_rng(seed + 1).choice(good.size, 2, replace=False)
    good.reshape(-1)[two] = good.reshape(-1)[one] ^ TOP
    bad = good.copy()
    bad.reshape(-1)[[one, two]] = good.reshape(-1)[[two, one]]
    assert_only_the_storage_hash_sees(good, bad)


@pytest.mark.parametrize("doubling", range(6))
def test_words_swapped_far_apart_lose_more_bits(doubling: int) -> None:
    """Pieces 2**k apart in one slice: weights differ by m*2**(k+1), so bit 63 - k is blind, and 62 - k is not."""
    good = make_block(doubling)
    near, far = 10, 10 + 2**doubling
    good[0].reshape(-1)[far] = good[0].reshape(-1)[near] ^ np.uint64(2 ** (63 - doubling))
    bad = good.copy()
    bad[0].reshape(-1)[[near, far]] = good[0].reshape(-1)[[far, near]]
    assert_only_the_storage_hash_sees(good, bad)
    good[0].reshape(-1)[far] = bad[0].reshape(-1)[near] = good[0].reshape(-1)[near] ^ np.uint64(2 ** (62 - doubling))
    assert_both_see(good, bad)


@pytest.mark.parametrize("tokens", [1, 2, 128])
def test_zero_tokens_appended(tokens: int) -> None:
    """A zero piece adds nothing, so the sum does not bind the length: the record stores the valid tokens."""
    good = make_block(tokens)
    zeros = np.zeros((len(SLICES), tokens, CELL_PIECES), np.uint64)
    assert_only_the_storage_hash_sees(good, np.concatenate([good, zeros], axis=1))


def test_zero_block_is_zero_everywhere() -> None:
    """An all-zero block has the checksum 0 at every length and position."""
    zero = np.zeros((len(SLICES), TOKENS, CELL_PIECES), np.uint64)
    assert content_checksum(zero) == content_checksum(zero, first_token=0) == 0
    assert_only_the_storage_hash_sees(zero, zero[:, :64])


EQUAL_WEIGHTS = [((0, 1), (1, 0)), ((0, 4), (1, 1)), ((0, 7), (1, 2)), ((0, 3 * 1000 + 1), (1, 1000))]
"""((slice, j), (slice, j)): m = 1 and m = 3, so (2*j + 1) is three times the other."""


@pytest.mark.parametrize("pair", EQUAL_WEIGHTS)
def test_contents_swapped_at_equal_weights(pair: tuple[tuple[int, int], tuple[int, int]]) -> None:
    one, two = pair
    weights = [slice_factor(*SLICES[i]) * (2 * j + 1) for i, j in pair]
    assert weights[0] == weights[1]
    good = make_block(one[1])
    flat, bad = good.reshape(len(SLICES), -1), good.copy().reshape(len(SLICES), -1)
    bad[one], bad[two] = flat[two], flat[one]
    assert_only_the_storage_hash_sees(good, bad.reshape(good.shape), first_token=0)


def test_all_equal_weights_swapped_at_once() -> None:
    """Every third piece of one slice exchanged with the other slice: a third of a slice is foreign, unseen."""
    good = make_block(3)
    bad = good.copy().reshape(len(SLICES), -1)
    small = np.arange(bad.shape[1] // 3)
    bad[0, 3 * small + 1], bad[1, small] = bad[1, small].copy(), bad[0, 3 * small + 1].copy()
    assert_only_the_storage_hash_sees(good, bad.reshape(good.shape), first_token=0)


@pytest.mark.parametrize(("lane", "share"), [(63, 1 / 2), (62, 1 / 4), (60, 1 / 16)])
def test_stuck_bit_lane_in_a_page(lane: int, share: float) -> None:
    """A lane stuck at 1 in 4 KiB leaves the lowest 64 - lane bits of a sum of odd numbers: often 0."""
    trials, unseen, rng = 1000, 0, np.random.default_rng(lane)
    for _ in range(trials):
        good = rng.integers(0, 2**64, (len(SLICES), 1, PAGE_PIECES), np.uint64)
        bad = good.copy()
        bad[1] |= np.uint64(2**lane)
        unseen += content_checksum(bad) == content_checksum(good)
        assert storage_hash(bad) != storage_hash(good)
    assert 0.6 * share < unseen / trials < 1.4 * share


def test_keys_with_the_same_first_bytes() -> None:
    """A tag has 64 bits: it cannot tell these keys apart. The storage hash takes the whole key."""
    keys = [b"8 bytes." + b"one", b"8 bytes." + b"two"]
    one, two = block_checksum_tags(keys, fingerprint=99).tolist()
    payload = make_block(0).tobytes()
    assert one == two
    assert xxhash.xxh3_64_intdigest(keys[0] + payload) != xxhash.xxh3_64_intdigest(keys[1] + payload)


# --- certain detections, and faults that are seen ------------------------------------------------------------------


@pytest.mark.parametrize("part", range(len(SLICES)))
def test_any_single_bit_flip_shows(part: int) -> None:
    """Every bit of a small slice; all sums differ from the good one, and XXH3-64 differs too."""
    good = make_block(part, tokens=4, cell_pieces=3)
    for index in range(good[part].size):
        for bit in range(64):
            bad = good.copy()
            bad[part].reshape(-1)[index] ^= np.uint64(1 << bit)
            assert_both_see(good, bad)


def test_any_change_within_one_piece_shows() -> None:
    rng = np.random.default_rng(5)
    good = make_block(5, tokens=4, cell_pieces=3)
    for change in rng.integers(1, 2**64, 2000, np.uint64):
        bad = good.copy()
        bad.reshape(-1)[rng.integers(bad.size)] ^= change
        assert_both_see(good, bad)


def test_same_data_under_another_tag() -> None:
    """Intact bytes, asked for under another hash or by another model: stored ^ tag is another value."""
    checksum = content_checksum(make_block(6))
    hashes = [np.random.default_rng(seed).bytes(32) for seed in range(8)]
    tags = [tag for fingerprint in (0, 1, 2**63) for tag in block_checksum_tags(hashes, fingerprint).tolist()]
    for tag in tags:
        stored = checksum ^ tag
        assert [stored ^ other == checksum for other in tags] == [other == tag for other in tags]
    assert len(set(tags)) == len(tags) == 24


def page(block: Pieces, rng: np.random.Generator) -> Pieces:
    """A random 4 KiB page of the block, as a view."""
    pages: Pieces = block.reshape(-1, PAGE_PIECES)
    chosen: Pieces = pages[int(rng.integers(len(pages)))]
    return chosen


def zero_page(block: Pieces, rng: np.random.Generator) -> None:
    page(block, rng)[:] = 0


def ones_page(block: Pieces, rng: np.random.Generator) -> None:
    page(block, rng)[:] = 2**64 - 1


def garbage_page(block: Pieces, rng: np.random.Generator) -> None:
    page(block, rng)[:] = rng.integers(0, 2**64, PAGE_PIECES, np.uint64)


def duplicated_page(block: Pieces, rng: np.random.Generator) -> None:
    one, two = rng.choice(block.size // PAGE_PIECES, 2, replace=False)
    pages = block.reshape(-1, PAGE_PIECES)
    pages[one] = pages[two]


def torn_sector(block: Pieces, rng: np.random.Generator) -> None:
    page(block, rng)[:64] = 0


def byte_shift(block: Pieces, rng: np.random.Generator) -> None:
    flat = block.reshape(-1).view(np.uint8)
    flat[:] = np.roll(flat, int(rng.integers(1, 8)))


FAULTS = [zero_page, ones_page, garbage_page, duplicated_page, torn_sector, byte_shift]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_gross_damage_shows(fault: Callable[[Pieces, np.random.Generator], None]) -> None:
    good = make_block(7)
    for seed in range(50):
        bad = good.copy()
        fault(bad, np.random.default_rng(seed))
        assert_both_see(good, bad)
