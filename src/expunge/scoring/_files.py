"""Writing a table whole or not at all."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from expunge._files import write_whole


def write_parquet(path: str | Path, columns: dict[str, Any]) -> None:
    """Write columns aside and rename.

    Args:
        path: the file; its folder exists.
        columns: arrays by name.
    """
    table = pa.table(columns)
    write_whole(Path(path), lambda aside: pq.write_table(table, aside))
