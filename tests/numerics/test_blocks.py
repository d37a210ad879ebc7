import pytest
import torch

from bitport.numerics import block_amax, expand, from_blocks, spread, to_blocks

BLOCKS = [(0, 0), (1, 0), (0, 1), (1, 8), (1, 7), (4, 5), (3, 0), (64, 64), (1, 1)]
SHAPE = (10, 24)


def slices(block: tuple[int, int], n: int, k: int) -> list[list[tuple[slice, slice]]]:
    rows, columns = block[0] or n, block[1] or k
    return [[(slice(i, i + rows), slice(j, j + columns)) for j in range(0, k, columns)] for i in range(0, n, rows)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_largest_magnitude_of_each_block(block: tuple[int, int]) -> None:
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    loop = [[x[..., r, c].abs().amax((-2, -1)) for r, c in row] for row in slices(block, *SHAPE)]
    assert torch.equal(block_amax(x, block), torch.stack([torch.stack(row, -1) for row in loop], -2))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_expand_puts_a_scale_at_each_of_its_elements(block: tuple[int, int]) -> None:
    places = slices(block, *SHAPE)
    scale = torch.arange(2.0 * len(places) * len(places[0])).reshape(2, len(places), len(places[0]))
    expected = torch.empty(2, *SHAPE)
    for i, row in enumerate(places):
        for j, (r, c) in enumerate(row):
            expected[:, r, c] = scale[:, i, j, None, None]
    assert torch.equal(expand(scale, block, *SHAPE), expected)
    blocked = to_blocks(torch.zeros(2, *SHAPE), block) + spread(scale)
    assert torch.equal(from_blocks(blocked, *SHAPE), expected)


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
def test_expand_is_a_view_where_it_can_be(block: tuple[int, int]) -> None:
    scale = torch.ones(block[0] * 9 + 1, block[1] * 23 + 1)
    assert expand(scale, block, *SHAPE).data_ptr() == scale.data_ptr()


def test_blocked_view_is_not_a_copy_without_short_blocks() -> None:
    x = torch.zeros(8, 64)
    assert to_blocks(x, (2, 16)).data_ptr() == x.data_ptr()
    assert to_blocks(x, (2, 16)).shape == (4, 2, 4, 16)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (2, 2)], ids=str)
def test_empty_matrices(block: tuple[int, int], shape: tuple[int, int]) -> None:
    blocked = to_blocks(torch.zeros(shape), block)
    assert from_blocks(blocked, *shape).shape == shape
    assert expand(block_amax(torch.zeros(shape), block), block, *shape).shape == shape


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2\) scales, got \(3, 3\)"):
        expand(torch.ones(3, 3), (4, 16), 10, 24)
    with pytest.raises(ValueError, match=r"\(7,\)"):
        to_blocks(torch.ones(7), (1, 1))
