"""Which rank writes which bytes of a model's files: every byte once, and no page by two ranks."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ringstow.dcp import _export_plan
from ringstow.dcp._export_plan import PAGE, Box, Shares, Tensor, first_element, runs


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(_export_plan, "UNIT_BYTES", 4 * PAGE)
    monkeypatch.setattr(_export_plan, "ROUND_BYTES", 8 * PAGE)


def elements(shape, box):
    """Return the row-major numbers of a box's elements, in order."""
    ranges = [range(at, at + n) for at, n in zip(*box, strict=True)]
    numbers = []
    for index in itertools.product(*ranges):
        at = 0
        for size, i in zip(shape, index, strict=True):
            at = at * size + i
        numbers.append(at)
    return numbers


def split(chance, shape, count):
    """Cut a shape into boxes along random dimensions; some ranks get none."""
    boxes = [Box((0,) * len(shape), shape)]
    while len(boxes) < count and shape:
        box = boxes.pop(0)
        dim = chance.randrange(len(shape))
        size = box.sizes[dim]
        at = chance.randint(0, size)
        for start, n in ((0, at), (at, size - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += start
            sizes[dim] = n
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return [box for box in boxes if box.elements()]


def model(chance, ranks):
    """Return random tensors that the ranks hold, and the layout of one file."""
    tensors = []
    for number in range(chance.randint(1, 8)):
        shape = tuple(chance.choice((1, 2, 5, 31, 64)) for _ in range(chance.randint(0, 3)))
        boxes = {}
        for box in split(chance, shape, chance.randint(1, ranks)):
            boxes[box] = sorted(chance.sample(range(ranks), chance.randint(1, 2)))
        tensors.append(Tensor(f"t{number}", shape, chance.choice((1, 2, 4, 8)), boxes))
    order = sorted(tensors, key=lambda t: -min(t.nbytes & -t.nbytes, PAGE))
    at, places = PAGE, {}
    for tensor in order:
        places[tensor.name] = (0, at)
        at += tensor.nbytes
    return tensors, [(PAGE, at)], [places[tensor.name] for tensor in tensors]


@pytest.mark.parametrize("seed", range(30))
def test_every_byte_is_written_once_and_no_page_by_two_ranks(small_units, seed):
    chance = random.Random(seed)
    ranks = chance.randint(2, 5)
    tensors, files, places = model(chance, ranks)
    length = files[0][1]
    written, writer_of, last_round, received = [None] * length, {}, 0, {}
    for unit in Shares(tensors, files, places, ranks).units():
        assert unit.round == 0 or unit.round >= last_round
        last_round = unit.round or last_round
        at = unit.pieces[0].offset
        assert at % PAGE == 0
        for piece in unit.pieces:
            tensor = tensors[piece.tensor]
            assert piece.offset == at
            at += piece.length * tensor.item_bytes
            wanted = range(piece.first, piece.first + piece.length)
            given = {n for box, _ in piece.sources for n in elements(tensor.shape, box)}
            assert given >= {*wanted}
            assert all(rank in tensor.boxes[box] for box, rank in piece.sources)
            start = places[piece.tensor][1]
            for n, byte in enumerate(range(piece.offset, at)):
                assert written[byte] is None
                written[byte] = (piece.tensor, byte - start)
                assert writer_of.setdefault(byte // PAGE, unit.writer) == unit.writer
                assert n < piece.length * tensor.item_bytes
            if unit.round:
                key = unit.writer, unit.round
                received[key] = received.get(key, 0) + piece.length * tensor.item_bytes
        assert at % PAGE == 0 or at == length
    assert None not in written[PAGE:]
    largest = _export_plan.UNIT_BYTES + PAGE
    assert all(n <= _export_plan.ROUND_BYTES + largest for n in received.values())


@pytest.mark.parametrize("seed", range(30))
def test_runs_are_the_elements_of_a_range_in_order(seed):
    chance = random.Random(seed)
    shape = tuple(chance.randint(1, 5) for _ in range(chance.randint(0, 4)))
    first = chance.randrange(math.prod(shape))
    count = chance.randint(1, math.prod(shape) - first)
    found = [n for run in runs(shape, first, count) for n in elements(shape, run)]
    assert found == [*range(first, first + count)]


@pytest.mark.parametrize("seed", range(30))
def test_box_is_one_run_exactly_if_its_elements_follow_each_other(seed):
    chance = random.Random(seed)
    shape = tuple(chance.randint(1, 4) for _ in range(chance.randint(0, 4)))
    for box in split(chance, shape, 4):
        numbers = elements(shape, box)
        follow = numbers == [*range(numbers[0], numbers[0] + len(numbers))]
        assert first_element(shape, box) == (numbers[0] if follow else None)


def test_replicas_share_the_work():
    box = Box((0,), (64 << 20,))
    tensor = Tensor("w", (64 << 20,), 1, {box: [0, 1, 2, 3]})
    units = [*Shares([tensor], [(PAGE, PAGE + tensor.nbytes)], [(0, PAGE)], 4).units()]
    bytes_of = [0] * 4
    for unit in units:
        bytes_of[unit.writer] += sum(piece.length for piece in unit.pieces)
        assert unit.round == 0
    assert max(bytes_of) - min(bytes_of) <= 2 * _export_plan.UNIT_BYTES


def test_shards_of_rows_send_only_what_shares_a_page():
    rows, width, ranks = 1000, 777, 4
    boxes = {Box((n * 250, 0), (250, width)): [n] for n in range(ranks)}
    tensor = Tensor("w", (rows, width), 4, boxes)
    units = Shares([tensor], [(PAGE, PAGE + tensor.nbytes)], [(0, PAGE)], ranks).units()
    moved = sum(
        piece.length * 4
        for unit in units
        for piece in unit.pieces
        for _, rank in piece.sources
        if rank != unit.writer
    )
    assert 0 < moved < ranks * PAGE
