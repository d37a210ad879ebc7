"""Look up 4-bit codes in a table of 16-bit numbers, four at a time, for matrix units that multiply bfloat16 or float16.
Lower and upper bytes are looked up separately (tables.py) and then interleaved::

    word        .. c3 c2 c1 c0        four bits each
    low          l3 l2 l1 l0          lower bytes of their entries
    high         h3 h2 h1 h0          upper bytes
    pairs        h1 l1 h0 l0   h3 l3 h2 l2
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from bitport.backends.triton.decode import UNIT, load_word
from bitport.backends.triton.tables import pairs_of


@triton.constexpr_function
def together() -> int:
    """Return how many adjacent columns a thread passes to matrix units from codes that it holds: two on sm90 and sm100,
    elsewhere as many of one word as Triton lets it."""
    return 2 if cuda_capability_geq(9) and not cuda_capability_geq(12) else 4


@triton.jit
def apart(columns: tl.tensor) -> tl.tensor:
    """Reorder [ROWS, COLUMNS] so that a thread keeps the adjacent words that it has loaded: four threads take turns in
    passing the columns of a row to matrix units, ``together`` each."""
    ROWS: tl.constexpr = columns.shape[0]
    COLUMNS: tl.constexpr = columns.shape[1]
    TOGETHER: tl.constexpr = together()
    quarters = tl.reshape(columns, (ROWS, 4, COLUMNS // (4 * TOGETHER), TOGETHER))
    return tl.reshape(tl.permute(quarters, (0, 2, 1, 3)), (ROWS, COLUMNS))


@triton.jit
def load_entries(
    data: tl.tensor,
    row: tl.tensor,
    unit: tl.tensor,
    k: tl.tensor,
    row_bytes: tl.tensor,
    factor: tl.tensor,
    NUMBER: tl.constexpr,
    WORDS: tl.constexpr,
    EVEN: tl.constexpr,
    FOLD: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """Load the entries of codes as [ROWS, UNITS * 8] of type DOT, in the column order of ``apart``; with FOLD times
    ``factor``, which then has that type."""
    word = load_word(data, row, unit, k, row_bytes, NUMBER, WORDS, EVEN).to(tl.int32, bitcast=True)
    from_0, from_2 = pairs_of(word, 0, NUMBER, DOT)
    from_4, from_6 = pairs_of(word, 16, NUMBER, DOT)
    pair = tl.join(tl.join(from_0, from_4), tl.join(from_2, from_6))
    pair = tl.reshape(pair, (row.shape[0], unit.shape[0], 4))
    high = (pair >> 16).to(tl.int16).to(DOT, bitcast=True)
    low = pair.to(tl.int16).to(DOT, bitcast=True)
    if FOLD:
        high = high * factor
        low = low * factor
    return apart(tl.reshape(tl.join(low, high), (row.shape[0], unit.shape[0] * UNIT)))
