"""The one place where token values are checked, brought to float32 and added up, used by every term."""

from torch import Tensor, bfloat16, float16, int64

from expunge.objectives._masc import SumCount


def at_least_float32(values: Tensor) -> Tensor:
    """Return half precision as float32; float32 and float64 stay as they are."""
    return values.float() if values.dtype in (float16, bfloat16) else values


def row_counts(rows: Tensor, n_rows: int) -> Tensor:
    """Count the labelled tokens of each row.

    Args:
        rows: (N,) int64, the row each token belongs to, in [0, n_rows).
        n_rows: rows in the batch, with or without tokens.

    Returns:
        (n_rows,) int64.

    Raises:
        ValueError: rows is no (N,) int64 tensor, or a row is outside [0, n_rows).

    Example:
        >>> import torch
        >>> row_counts(torch.tensor([0, 0, 2]), 3).tolist()
        [2, 0, 1]
    """
    if rows.dim() != 1:
        raise ValueError(f"rows: found shape {tuple(rows.shape)}, accepted is (N,)")
    if rows.dtype != int64:
        raise ValueError(f"rows: found {rows.dtype}, accepted is torch.int64")
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= n_rows):
        raise ValueError(f"rows: found {int(rows.min())} to {int(rows.max())}, accepted is 0 to {n_rows - 1}")
    return rows.new_zeros(n_rows).index_add(0, rows, rows.new_ones(rows.shape))


def row_sums(values: Tensor, rows: Tensor, n_rows: int) -> Tensor:
    """Add up the token values of each row, in at least float32.

    Args:
        values: (N,) values of the labelled tokens, any floating dtype.
        rows: (N,) int64, the row each token belongs to, in [0, n_rows).
        n_rows: rows in the batch, with or without tokens.

    Returns:
        (n_rows,) float32 (float64 for float64 values), attached to the graph of `values` also where a row is empty.

    Raises:
        ValueError: the shapes differ, or `rows` is not what `row_counts` accepts.

    Example:
        >>> import torch
        >>> row_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), 3).tolist()
        [3.0, 0.0, 4.0]
    """
    if values.shape != rows.shape:
        raise ValueError(f"values: found shape {tuple(values.shape)}, accepted is {tuple(rows.shape)}, that of rows")
    row_counts(rows, n_rows)
    values = at_least_float32(values)
    return values.new_zeros(n_rows).index_add(0, rows, values)


def token_total(values: Tensor) -> SumCount:
    """Add up one value for each token: Σ_t x_t over N tokens.

    Args:
        values: (N,) values of the labelled tokens, at least float32.

    Returns:
        The sum and N; for N = 0 a zero attached to `values`.

    Raises:
        ValueError: values is not (N,).
    """
    if values.dim() != 1:
        raise ValueError(f"token values: found shape {tuple(values.shape)}, accepted is (N,)")
    return SumCount(at_least_float32(values).sum(), values.shape[0])


def row_total(values: Tensor, counted: Tensor) -> SumCount:
    """Add up one value for each counted row; the others take no part, in value or gradient.

    Args:
        values: (n_rows,) values, at least float32.
        counted: (n_rows,) bool, the rows that have what the term compares.

    Returns:
        The sum and the number of counted rows; a zero attached to `values` where there is none.
    """
    kept = values[counted]
    return SumCount(kept.sum(), kept.shape[0])
