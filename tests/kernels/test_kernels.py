"""Kernels do the arithmetic that they say, and every version of them the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import versions
from tests.programs import ROOT
from thinwire import kernels
from thinwire.common import messages
from thinwire.common.dtypes import AVERAGED
from thinwire.errors import UsageError
from thinwire.kernels import dispatch, eager, hashing

CPU = torch.device("cpu")


def vector(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from([1, 2, 4, 8]), rows=st.integers(0, 4), width=st.integers(0, 9), seed=st.integers(0, 99))
def test_packing_gives_everything_back_in_so_many_bits(bits: int, rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, 8 * width), generator=generator).to(torch.int8)
    packed = kernels.pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() * 8 == codes.numel() * bits
    assert torch.equal(kernels.unpack(packed, bits), codes)
    if bits < 8:
        assert torch.equal(kernels.unpack(packed, bits, signed=False), codes & (2**bits - 1))


def test_sixteen_bits_go_as_two_bytes() -> None:
    codes = torch.tensor([[300, -300]], dtype=torch.int16)
    assert kernels.pack(codes, 16).shape == (1, 4)
    assert torch.equal(kernels.unpack(kernels.pack(codes, 16), 16), codes)


@pytest.mark.parametrize("count", [1, 7, 512, 513, 5000])
@pytest.mark.parametrize("block", [8, 512])
def test_blocks_have_scales_of_their_own(count: int, block: int) -> None:
    x = vector(count)
    expected = [part.abs().max() for part in x.split(block)]
    assert torch.equal(kernels.abs_max(x, block), torch.stack(expected))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_a_value_that_is_not_finite_is_marked(bad: float) -> None:
    x = vector(30)
    x[12] = bad
    assert kernels.abs_max(x, 10).isinf().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", AVERAGED, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found(bad: float, dtype: torch.dtype) -> None:
    for count in (1, 7, 1000):
        x = vector(count).to(dtype)
        assert kernels.all_finite(x)
        x[count // 2] = bad
        assert not kernels.all_finite(x)
    assert kernels.all_finite(torch.empty(0, dtype=dtype))
    assert kernels.all_finite(torch.full((100,), torch.finfo(dtype).max, dtype=dtype))


@pytest.mark.parametrize("levels", [1, 7, 31, 127])
def test_rounding_goes_to_a_neighbour_and_nearest_to_the_nearest(levels: int) -> None:
    x = vector(5000)
    scales = kernels.abs_max(x, 512)
    exact = x * levels / scales.repeat_interleave(512)[:5000]
    codes = kernels.quantise(x, scales, levels, 512, key=3)
    assert codes.dtype == torch.int8
    assert (codes - exact).abs().max() <= 1 + 1e-4
    assert codes.abs().max() <= levels
    nearest = kernels.quantise(x, scales, levels, 512, key=None)
    assert (nearest - exact).abs().max() <= 0.5 + 1e-4
    values = kernels.dequantise(codes, scales, levels, 512)
    torch.testing.assert_close(kernels.quantisation_error(x, codes, scales, levels, 512), x - values, rtol=0, atol=1e-6)


def test_vectors_that_do_not_fit_into_the_cache_are_treated_alike_everywhere() -> None:
    x = vector(3 * eager.CACHED_ELEMENTS + 777)
    scales = kernels.abs_max(x, 512)
    top = scales.repeat_interleave(512)[: len(x)]
    assert torch.equal(scales, torch.stack([part.abs().max() for part in x.split(512)]))
    codes = kernels.quantise(x, scales, 31, 512, key=None)
    assert torch.equal(codes, (x * (31 / scales).repeat_interleave(512)[: len(x)]).round().to(torch.int8))
    values = kernels.dequantise(codes, scales, 31, 512)
    assert torch.equal(values, codes * (top / 31))
    assert torch.equal(kernels.quantisation_error(x, codes, scales, 31, 512), x - values)
    drawn = kernels.quantise(x, scales, 31, 512, key=5)
    assert (drawn - x * 31 / top).abs().max() <= 1.001


@pytest.mark.parametrize("extreme", [-(2**31), -(2**31) + 1, 2**31 - 1])
def test_no_dither_moves_a_whole_number(extreme: int) -> None:
    dither = torch.tensor([extreme], dtype=torch.int32) * hashing.DITHER
    whole = torch.arange(-127.0, 128.0)
    assert torch.equal((whole + dither).round(), whole)


def test_the_same_key_gives_the_same_and_another_key_another() -> None:
    x, scales = vector(4096), torch.full((8,), 4.0)
    one, again, other = (kernels.quantise(x, scales, 31, 512, key) for key in (5, 5, 6))
    assert torch.equal(one, again)
    assert 0.05 < (one != other).float().mean() < 0.6


def test_dither_is_uniform_and_knows_no_neighbours() -> None:
    """Over places in a block, over blocks and over keys: mean, variance, and correlation with the next one."""
    places = hashing.position_hashes(512, CPU)
    table = torch.stack([
        torch.bitwise_xor(places, hashing.block_hashes(64, key, CPU)[:, None]).mul_(hashing.MULTIPLIER) * hashing.DITHER
        for key in range(100, 164)
    ]).double()  # [key, block, place]  # fmt: skip
    count = table.numel()
    assert table.abs().max() < 0.5
    assert abs(table.mean()) < 5 * (1 / 12 / count) ** 0.5
    assert table.var() == pytest.approx(1 / 12, rel=0.01)
    for axis in range(3):
        ahead, behind = table.narrow(axis, 1, table.shape[axis] - 1), table.narrow(axis, 0, table.shape[axis] - 1)
        assert abs((ahead * behind).mean() * 12) < 5 / ahead.numel() ** 0.5, f"neighbours along axis {axis}"
    counts = torch.histc(table.float(), 64, -0.5, 0.5)
    assert ((counts - count / 64).square() / (count / 64)).sum() < 150, "chi square of 63 degrees of freedom"


def test_uniform_numbers_are_uniform() -> None:
    numbers = hashing.uniform(200_000, 9, CPU)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers.float(), 50, 0, 1)
    assert ((counts - 4000).square() / 4000).sum() < 120


def test_zeros_and_tiny_scales_do_no_harm() -> None:
    for x in (torch.zeros(20), torch.full((20,), 1e-42)):
        codes = kernels.quantise(x, kernels.abs_max(x, 8), 127, 8, key=1)
        assert kernels.dequantise(codes, kernels.abs_max(x, 8), 127, 8).isfinite().all()


@pytest.mark.parametrize("size", [1e-44, 1e-40, 1e-38, 1e-37, 3e-37, 2e-36])
@pytest.mark.parametrize("levels", [1, 7, 31, 127])
def test_values_too_small_for_a_scale_of_their_own_are_right_on_average_and_nothing_is_lost(
    levels: int, size: float
) -> None:
    """1/1e-40 is no float32, and such values became zeros."""
    x = torch.linspace(-1, 1, 64).mul_(size).repeat(2000)
    scales = kernels.abs_max(x, 64)
    codes = kernels.quantise(x, scales, levels, 64, key=1)
    values = kernels.dequantise(codes, scales, levels, 64)
    assert (values.double() - x.double()).abs().max() <= scales[0].double() / levels * 1.001, "to a neighbour"
    lost = kernels.quantisation_error(x, codes, scales, levels, 64)
    assert torch.equal(lost, x - values), "what is not sent is kept"
    step = scales[0].double() / levels
    off = (values.double() - x.double()).view(2000, 64).mean(0) / step
    assert off.abs().max() < 5 * 0.5 / 2000**0.5, "five standard errors"
    nearest = kernels.quantise(x, scales, levels, 64, key=None)
    assert kernels.quantisation_error(x, nearest, scales, levels, 64).abs().max() <= 0.501 * step, (
        "under feedback: the nearest"
    )


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    dispatch._chosen_version.cache_clear()
    monkeypatch.setattr(dispatch, "_broken_devices", [])
    monkeypatch.setattr(messages, "_said", set())
    yield monkeypatch
    dispatch._chosen_version.cache_clear()


def test_without_a_compiler_the_eager_ones_are_used_and_it_is_said_once(
    fresh_choice: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from thinwire.kernels import compiled

    def fails(*args: object) -> None:
        raise RuntimeError("no C++ compiler\nand a long story")

    fresh_choice.setenv("THINWIRE_KERNELS", "compiled")
    for name in ("abs_max", "quantise", "dequantise"):
        fresh_choice.setattr(compiled, name, fails)
    x = vector(2048)
    for _ in range(2):
        scales = kernels.abs_max(x, 512)
        codes = kernels.quantise(x, scales, 31, 512, key=1)
    expected = torch.empty(2048, dtype=torch.int8)
    eager.quantise(x, scales, 31, 512, 1, expected, None)
    assert torch.equal(codes, expected)
    said = capsys.readouterr().err
    assert said.count("kernels cannot be compiled here (no C++ compiler)") == 1
    assert "long story" not in said


def test_an_unknown_choice_is_explained(fresh_choice: pytest.MonkeyPatch) -> None:
    fresh_choice.setenv("THINWIRE_KERNELS", "cuda")
    with pytest.raises(UsageError, match="THINWIRE_KERNELS=cuda; possible: eager, compiled, triton"):
        kernels.abs_max(vector(2048), 512)


@pytest.mark.parametrize(
    ("choice", "interpret", "on_cpu", "on_gpu"),
    [
        (None, None, "eager", "triton"),
        ("eager", None, "eager", "eager"),
        ("compiled", None, "compiled", "compiled"),
        ("triton", None, "eager", "triton"),
        ("triton", "1", "triton", "triton"),
    ],
)
def test_each_device_has_its_version(
    fresh_choice: pytest.MonkeyPatch, choice: str | None, interpret: str | None, on_cpu: str, on_gpu: str
) -> None:
    for name, value in (("THINWIRE_KERNELS", choice), ("TRITON_INTERPRET", interpret)):
        if value is None:
            fresh_choice.delenv(name, raising=False)
        else:
            fresh_choice.setenv(name, value)
    assert dispatch.choice_for("cpu") == on_cpu
    assert dispatch.choice_for("cuda") == on_gpu
    fresh_choice.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    assert dispatch.choice_for("cuda") == ("eager" if choice is None else on_gpu), "without Triton"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("version", ["compiled", "triton"])
def test_every_version_does_what_the_eager_one_does(version: str) -> None:
    """In a process of its own: compiling starts others that stay, and Triton's interpreter is chosen for a process."""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.versions", version, "cpu"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.timeout(600)
def test_triton_on_a_gpu_does_what_the_eager_version_does() -> None:
    from thinwire.kernels import triton

    versions.compare(triton, "cuda", versions.ALL)
    versions.compare_any_words(triton, "cuda")
    versions.compare_clamped(triton, "cuda")
