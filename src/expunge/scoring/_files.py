"""Writing a table whole or not at all."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_parquet(path: str | Path, columns: dict[str, Any]) -> None:
    """Write columns aside and rename.

    Args:
        path: the file; its folder exists.
        columns: arrays by name.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.part")
    try:
        pq.write_table(pa.table(columns), aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
