"""Codecs: what comes back is close, right on average, and as long as they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from thinwire.codecs.base import Codec, even_blocks
from thinwire.codecs.multiscale import finest_scale, magnify, multiscale
from thinwire.codecs.words import words

CODECS: dict[str, tuple[Callable[[int], Codec], int]] = {
    "2 bits": (lambda block: words(2, block), 2),
    "4 bits": (lambda block: words(4, block), 4),
    "8 bits": (lambda block: words(8, block), 8),
    "4 bits, 2 scales": (lambda block: multiscale(4, 2, block), 5),
    "8 bits, 3 scales": (lambda block: multiscale(8, 3, block), 10),
}


def matrix(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + width))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("rows", "width", "block"), [(1, 8, 8), (3, 1024, 512), (4, 1560, 520)])
def test_rows_become_so_many_bytes_and_come_back(name: str, rows: int, width: int, block: int) -> None:
    make, bits = CODECS[name]
    codec, x = make(block), matrix(rows, width)
    data = codec.encode(x.view(-1), rows, width, 1, None)
    assert data.dtype == torch.uint8
    assert data.shape == (rows, width * bits // 8 + 4 * width // block)
    back = codec.decode(data, width, x.numel()).view(x.shape)
    tops = x.view(-1, block).abs().amax(1).repeat_interleave(block).view(x.shape)
    levels = {2: 1, 4: 7, 8: 127, 5: 7, 10: 127}[bits]
    assert ((back - x).abs() <= tops / levels * 1.0001).all()
    alone = [codec.decode(data[i : i + 1], width, width) for i in range(rows)]
    assert torch.equal(torch.stack(alone), back), "each row can be read without the others"
    assert torch.equal(codec.decode_mean(data, width), sum(alone[1:], alone[0]) / rows)
    lost = torch.empty(rows * width)
    nearest = codec.decode(codec.encode(x.view(-1), rows, width, None, lost), width, rows * width)
    assert torch.equal(lost, x.view(-1) - nearest)
    most = 0.625 if bits == 2 else 0.5 / levels  # of the largest: on its other side, 2 bits end at ⅜ of it
    assert (lost.view(x.shape).abs() <= tops * most * 1.0001).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("count", [1, 20, 24, 47])
def test_what_is_missing_in_the_last_rows_is_zero(name: str, count: int) -> None:
    codec, x = CODECS[name][0](8), matrix(1, 48)[0, :count]
    filled = torch.nn.functional.pad(x, (0, 48 - count))
    data, lost = codec.encode(filled, 3, 16, 5, None), torch.empty(count)
    assert torch.equal(codec.encode(x, 3, 16, 5, lost), data)
    assert torch.equal(codec.decode(data, 16, count), codec.decode(data, 16, 48)[:count])
    assert torch.equal(lost, x - codec.decode(data, 16, count))


@pytest.mark.parametrize("name", CODECS)
def test_many_encodings_give_the_mean(name: str) -> None:
    codec, x = CODECS[name][0](8), matrix(1, 16)
    given = x.repeat(1, 100).view(-1)
    draws = [codec.decode(codec.encode(given, 100, 16, key, None), 16, 1600) for key in range(20)]
    found = torch.cat(draws).view(-1, 16).double()
    errors = found.std(0) / 2000**0.5 + (found.amax(0) - found.amin(0)).max() / 2000
    assert ((found.mean(0) - x[0]) / errors).abs().max() < 5


HARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "long tails": lambda x: x**5,
    "one value": lambda x: torch.where(torch.arange(len(x)) % 64 == 17, x, 0.0),
    "one side": lambda x: x.abs(),
    "both ends alike": lambda x: x.sign(),
    "tiny": lambda x: x * 1e-37,
}


@pytest.mark.parametrize("kind", HARD)
def test_two_bits_to_the_nearest_lose_a_part_of_every_block_and_enlarge_nothing(kind: str) -> None:
    """What error feedback needs: the error of a value is no larger than the value, that of a block is smaller."""
    x = HARD[kind](torch.randn(64 * 500, generator=torch.Generator().manual_seed(1)))
    codec, lost = words(2, 64), torch.empty(64 * 500)
    back = codec.decode(codec.encode(x, 1, len(x), None, lost), len(x), len(x))
    assert (lost.abs() <= x.abs() * 1.000001).all()
    assert not back[x == 0].any()
    assert (back * x >= 0).all(), "no sign changes"
    shares = lost.view(-1, 64).double().square().sum(1) / x.view(-1, 64).double().square().sum(1)
    if kind != "tiny":  # these wait until they are large enough for a scale
        assert shares.max() < {"normal": 0.35, "one value": 0.07}.get(kind, 0.5)
    if kind == "normal":
        assert shares.mean() < 0.16, "with 1, 0 and −1 times the largest it was 0.45"


def test_two_bits_to_the_nearest_do_not_prefer_a_sign() -> None:
    x, codec = matrix(1, 6400)[0], words(2, 64)
    there, back = (codec.decode(codec.encode(y, 1, 6400, None, None), 6400, 6400) for y in (x, -x))
    assert torch.equal(there, -back)


@pytest.mark.parametrize("name", CODECS)
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(name: str) -> None:
    codec, x = CODECS[name][0](8), matrix(2, 24)
    x[1, 9] = torch.inf
    lost = torch.empty(48)
    back = codec.decode(codec.encode(x.view(-1), 2, 24, 0, lost), 24, 48).view(2, 24)
    assert torch.equal(lost.view(2, 24).isnan(), back.isnan())
    assert back[1, 8:16].isnan().all()
    assert back.isnan().sum() == 8


def test_the_finest_scale_that_fits_is_chosen_by_the_value() -> None:
    x = torch.tensor([4.0, 1.0, 1.001, 0.25, 0.2501, 0.0, -1.0, -0.0625])
    finest = finest_scale(x, torch.tensor([4.0]), scales=3, block=8)
    assert finest.tolist() == [0, 1, 0, 2, 1, 2, 1, 2]
    assert torch.equal(magnify(magnify(x, finest), -finest), x), "a change of scale is exact"
    assert magnify(x, finest).abs().max() <= 4


def test_even_blocks_cover_a_width_with_little_to_spare() -> None:
    for width in range(8, 9000, 8):
        block = even_blocks(width, 512)
        count = -(-width // block)
        assert block % 8 == 0
        assert block <= 512
        assert count * block - width < 8 * count
