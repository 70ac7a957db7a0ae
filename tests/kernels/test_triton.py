"""What Triton's kernels rely on, and the machine code that they become: without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tests.programs import ROOT
from thinwire.kernels import formulas, hashing

LARGEST_DITHER = torch.tensor(2.0**31) * hashing.DITHER


def numbers(exponent: int) -> Tensor:
    """All float32 with this exponent; with −127 these are the denormal ones."""
    return (torch.arange(2**23, dtype=torch.int32) | ((exponent + 127) << 23)).view(torch.float32)


def largest_steps(exponent: int, levels: float) -> Tensor:
    """scale·(1/scale·levels) for all scales with this exponent: no value of a block is more steps than that."""
    scales = numbers(exponent)
    scales = scales[scales >= formulas.MIN_SCALE]
    return scales * (scales.reciprocal() * levels)


@pytest.mark.parametrize("exponent", [-127, -126, -125, -124, -123, -120, -119, 0, 127])
def test_steps_by_way_of_float64_are_those_of_a_division(exponent: int) -> None:
    for levels in (7.0, 127.0):
        scales = numbers(exponent)
        assert torch.equal((scales.double() * (1 / levels)).float(), scales / torch.tensor(levels))


@pytest.mark.parametrize("exponent", [-119, 0, 125, 126, 127])  # from 126 on, the reciprocal is denormal
def test_a_block_needs_no_clamp_unless_it_has_127_levels_and_dither(exponent: int) -> None:
    for levels in (1.0, 7.0, 127.0):
        steps = largest_steps(exponent, levels)
        assert steps.max() <= levels * (1 + 2.0**-21)
        assert steps.round().max() <= levels
        assert ((steps + LARGEST_DITHER).round().max() <= levels) == (levels < 127)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_become_floats_and_bytes_without_conversions(bits: int) -> None:
    """As `_numbers` and `_encode_tile` do it, for every byte."""
    packed = torch.arange(256, dtype=torch.int32)
    half = 2 ** (bits - 1)
    again = torch.zeros(256, dtype=torch.int64)
    for shift in range(0, 8, bits):
        code = ((packed >> shift & (2 * half - 1)) ^ half) - half
        start = torch.tensor((127 + 23 - shift) << 23 | half << shift, dtype=torch.int32)
        number = ((packed & ((2 * half - 1) << shift)) ^ start).view(torch.float32) - start.view(torch.float32)
        assert torch.equal(number, code.float())
        assert not number[number == 0].signbit().any()
        low_bits = (number + (1.5 * 2**23 + half)).view(torch.int32)
        again += low_bits.long() << shift
    assert torch.equal((again ^ (255 // (2 * half - 1) * half)) & 255, packed.long())


@pytest.mark.timeout(300)
def test_compiled_for_an_h200_no_kernel_spills_or_needs_too_many_instructions() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, str(ROOT / "benchmarks" / "kernel_code.py"), "--capability", "90"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ *(.+?)  +\d+×\d .* (\d+)% +\d+ +(\d+) ", done.stdout, re.M)
    assert len(rows) == 17
    assert not [row for row in rows if int(row[1]) > 70 or int(row[2])]
