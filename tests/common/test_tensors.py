"""Many tensors as one vector or as bytes, and back; fingerprints."""

from __future__ import annotations

import pytest
import torch

from thinwire.common.tensors import as_vector, fingerprint, flatten, from_bytes, to_bytes, unflatten

SHAPES: list[tuple[int, ...]] = [(3, 2), (), (0, 4), (5,)]


def test_what_is_flattened_comes_back_in_its_shapes() -> None:
    given = [torch.randn(shape) for shape in SHAPES]
    given.append(torch.randn(4, 3).t())
    flat = flatten(given, torch.float64)
    assert flat.dtype == torch.float64
    found = unflatten(flat, given)
    assert all(torch.equal(a, b.float()) for a, b in zip(given, found, strict=True))
    assert all(t.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for t in found if t.numel())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.complex64])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_bytes_become_the_same_tensor_wherever_they_begin(
    shape: tuple[int, ...], dtype: torch.dtype, offset: int
) -> None:
    given = torch.randint(0, 2, shape).to(dtype)
    data = torch.cat([torch.zeros(offset, dtype=torch.uint8), to_bytes(given)])[offset:]
    found = from_bytes(data, dtype, shape)
    assert found.dtype == dtype
    assert torch.equal(found, given)


def test_tensors_that_are_not_contiguous_are_copied() -> None:
    given = torch.arange(6).view(2, 3).t()
    assert torch.equal(from_bytes(to_bytes(given), given.dtype, given.shape), given)
    assert torch.equal(from_bytes(to_bytes(torch.arange(6)[::2]), torch.int64, (3,)), torch.tensor([0, 2, 4]))


def test_any_tensor_has_a_fingerprint() -> None:
    plain = torch.arange(6).view(2, 3)
    assert fingerprint(plain.t()) == fingerprint(plain.t().contiguous()) != fingerprint(plain)
    wave = torch.tensor([1 + 2j, 3j])
    assert fingerprint(wave.conj()) == fingerprint(wave.conj().resolve_conj())
    for dtype in (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        assert fingerprint(torch.ones(4).to(dtype)) != fingerprint(torch.tensor([1.0, 0, 1, 1]).to(dtype))
    assert fingerprint(torch.tensor(3)) == fingerprint(torch.tensor(3)) != fingerprint(torch.zeros(0))


def test_a_vector_has_the_elements_of_views_that_skip_some() -> None:
    """Columns, every second element and expanded tensors lie in their memory otherwise than they are read."""
    whole = torch.arange(8.0).view(4, 2)
    for views in ([whole[:, 0]], [whole[:, ::2], whole[1]], [whole[0, 0].expand(3)], [whole.t(), whole]):
        assert torch.equal(as_vector(views), flatten(views))
    assert as_vector([torch.empty(0, device="meta")], torch.uint8).is_meta
    assert as_vector([torch.ones(2), torch.ones(1).half()], torch.float32).tolist() == [1, 1, 1]
