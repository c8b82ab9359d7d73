"""Reading examples from files, folders and the Hugging Face hub.

The format of a file is told from its content. Errors name the file, the line or row and the types, and never show what
a row says: the rows to forget are sensitive. Nothing a file says is used as a path.
"""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from expunge.data._records import Record, check_columns, one_line, rows_to_records
from expunge.errors import UsageError

FORMATS = "a JSON array, JSON lines, CSV, Parquet, plain text (.txt), or a folder of these saved by `datasets`"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_FILE_ENDINGS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt", ".arrow")
_SPLIT_WORDS = ("train", "test", "validation", "valid", "dev", "eval")


def read_records(
    source: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    name: str = "data",
    split: str = "train",
    allow_hub: bool = True,
) -> list[Record]:
    """Read the examples of a file, a folder or a dataset on the Hugging Face hub.

    Accepted rows: `prompt`+`completion`, `question`+`answer`, `messages` (a list of {role, content} that ends with the
    assistant), or `text`; where a file has several of these, the first named wins. Optional columns: `id`, `paraphrase`
    (or `paraphrased_question`). An array of strings, or one string, is raw text; so is a `.txt` file, as one row,
    unless it holds JSON objects.

    Args:
        source: path of a file or folder; or a hub name "owner/name" or "owner/name:configuration", tried only when no
            such path exists and it does not look like a file.
        columns: our column names to the file's, such as {"prompt": "Frage", "completion": "Antwort"}.
        name: what errors call the data, such as "forget".
        split: which split of a dataset folder or hub dataset to read.
        allow_hub: False forbids the network.

    Returns:
        At least one record, in the order of the file. Rows with an empty answer are kept here; `encode_records` drops
        and counts them.

    Raises:
        UsageError: nothing there, unreadable, malformed (with the line), wrong columns or types (with the row, counted
            from 1).

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "forget.jsonl"
        >>> _ = path.write_text('{"question": "Who is A?", "answer": "B"}')
        >>> read_records(path)[0].answer
        'B'
    """
    columns = check_columns(columns, name)
    where = f"{name} {one_line(source, 200)}"
    try:
        path = Path(source)
        is_file, is_folder, exists = path.is_file(), path.is_dir(), path.exists()
    except (OSError, ValueError):
        raise UsageError(f"{where}: not a usable path") from None
    if not str(source).strip():
        raise UsageError(f"{name}: the path is empty, a file, a folder or a hub dataset is needed")
    if is_file:
        records = rows_to_records(_read_file(path, where), columns, where=where)
    elif is_folder:
        records = _read_folder(path, columns, split, where)
    elif exists:
        raise UsageError(f"{where}: neither a file nor a folder")
    elif isinstance(source, str) and allow_hub and is_hub_name(source):
        records = rows_to_records(_read_hub(source, split, where), columns, where=where)
    else:
        raise UsageError(f"{where}: no such file or folder; accepted are {FORMATS}")
    if not records:
        raise UsageError(f"{where}: no rows, at least one is needed")
    return records


def read_rows(
    source: str | Path, *, name: str = "data", split: str = "train", allow_hub: bool = True
) -> list[dict[str, Any]]:
    """Read the rows of a file or hub dataset with all their columns, for benchmarks with columns of their own.

    Args:
        source: path of a file; or a hub name, as in `read_records`.
        name: what errors call the data.
        split: which split of a hub dataset to read.
        allow_hub: False forbids the network.

    Returns:
        At least one row; a row that is a string becomes {"text": …}.

    Raises:
        UsageError: nothing there, unreadable, malformed, or a row is neither an object nor a string.
    """
    where = f"{name} {one_line(source, 200)}"
    if Path(source).is_file():
        rows = _read_file(Path(source), where)
    elif isinstance(source, str) and allow_hub and is_hub_name(source):
        rows = _read_hub(source, split, where)
    else:
        raise UsageError(f"{where}: no such file; accepted are JSON, JSON lines, CSV, Parquet or text")
    if not rows:
        raise UsageError(f"{where}: no rows, at least one is needed")
    found: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping | str):
            raise UsageError(f"{where}: row {number} (counted from 1) is no object, an object is needed")
        found.append({"text": row} if isinstance(row, str) else dict(row))
    return found


def is_hub_name(source: str) -> bool:
    """Whether a text can only be a dataset on the hub: no path, and no file's name."""
    looks = _HUB_NAME.fullmatch(source) is not None and not source.lower().endswith(_FILE_ENDINGS)
    return looks and not Path(source).parent.exists()


def _read_file(path: Path, where: str) -> list[object]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{where}: cannot be read ({error.strerror or type(error).__name__})") from None
    ending = path.suffix.lower()
    if data.startswith(b"PAR1"):
        return _guarded(lambda: _parquet_rows(data), where, "not a readable Parquet file")
    if ending == ".parquet":
        raise UsageError(f"{where}: {'empty file' if not data else 'not a Parquet file, though its name says so'}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{where}: line {line} is not UTF-8 text; accepted are {FORMATS}") from None
    if not text.strip():
        raise UsageError(f"{where}: empty file")
    return _text_rows(text, ending, where)


def _text_rows(text: str, ending: str, where: str) -> list[object]:
    """Tell JSON, CSV and plain text apart by content; the ending decides only what content cannot."""
    start = text.lstrip()[0]
    if ending == ".txt":
        rows: list[object] = []
        if start in "[{":
            try:
                rows = _json_rows(text, where)
            except UsageError:
                rows = []  # prose that happens to start with a bracket
        return rows if rows and all(isinstance(row, dict) for row in rows) else [text]
    is_table = ending in (".csv", ".tsv")
    if start in "[{" or (start == '"' and not is_table):
        try:
            return _json_rows(text, where)
        except UsageError:
            # A header line may start with a bracket or a quote.
            if not is_table and (start != '"' or ending in _FILE_ENDINGS):
                raise
    elif ending in (".json", ".jsonl", ".ndjson"):
        raise UsageError(f"{where}: line {_first_line(text)} is not JSON")
    try:
        return _csv_rows(text, ending, where)
    except UsageError as error:
        if ending in _FILE_ENDINGS:
            raise
        # The name says nothing, and the content was no JSON: it may be anything.
        raise UsageError(f"{error}, if it is a table; accepted are {FORMATS}") from None


def _first_line(text: str) -> int:
    return text[: len(text) - len(text.lstrip())].count("\n") + 1


def _parse_json(text: str) -> tuple[Any, int | None]:
    """Parse JSON; the second value is the 1-based line of the fault, or None."""
    try:
        return json.loads(text), None
    except json.JSONDecodeError as error:
        return None, error.lineno
    except (ValueError, RecursionError):  # a number with too many digits; too deeply nested
        return None, 1


def _json_rows(text: str, where: str) -> list[object]:
    """Rows of a JSON array, of JSON lines, or of one object or string."""
    if text.lstrip().startswith("["):
        value, fault = _parse_json(text)
        if fault is not None:
            raise UsageError(f"{where}: line {fault} is not valid JSON")
        return list(value)
    rows: list[object] = []
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028, as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        value, fault = _parse_json(line)
        if fault is not None and not rows:
            value, fault = _parse_json(text)  # one object over several lines
            if fault is None:
                return [value]
            number = fault
        if fault is not None:
            raise UsageError(f"{where}: line {number} is not valid JSON")
        rows.append(value)
    return rows


def _csv_rows(text: str, ending: str, where: str) -> list[object]:
    """Rows of a CSV table with a header line; the separator is the most frequent of `,` `;` and tab in the header."""
    header = text.lstrip().split("\n", 1)[0]
    separator = "\t" if ending == ".tsv" else max(",;\t", key=header.count)
    # Books fit into one field, so the csv module's limit (a global setting) is lifted while reading.
    limit = csv.field_size_limit(sys.maxsize)
    rows: list[object] = []
    reader = csv.reader(io.StringIO(text.lstrip(), newline=""), delimiter=separator, strict=True)
    skipped = _first_line(text) - 1
    try:
        names = [column.strip() for column in next(reader)]
        if len(set(names)) < len(names):
            raise UsageError(f"{where}: the header line names a column twice")
        before = reader.line_num
        for fields in reader:
            if fields and len(fields) != len(names):
                line = skipped + before + 1
                raise UsageError(f"{where}: line {line} has {len(fields)} fields, the header line has {len(names)}")
            before = reader.line_num
            if fields:
                rows.append(dict(zip(names, fields, strict=True)))
    except csv.Error:
        raise UsageError(f"{where}: line {skipped + reader.line_num} is not valid CSV") from None
    finally:
        csv.field_size_limit(limit)
    if not rows:
        # Wrong columns say more than "no rows": it may not be a table at all.
        rows_to_records([dict.fromkeys(names, "")], {}, where=where)
    return rows


def _parquet_rows(data: bytes) -> list[object]:
    import pyarrow
    import pyarrow.parquet

    return list(pyarrow.parquet.read_table(pyarrow.BufferReader(data)).to_pylist())


def _guarded(read: Callable[[], list[object]], where: str, problem: str) -> list[object]:
    """Call a reader of another library, which may raise anything; only the type of its error is shown."""
    try:
        return read()
    except UsageError:
        raise
    except Exception as error:  # the libraries raise far more types than they document
        raise UsageError(f"{where}: {problem} ({type(error).__name__})") from None


def _read_folder(path: Path, columns: Mapping[str, str], split: str, where: str) -> list[Record]:
    try:
        return _folder_records(path, columns, split, where)
    except OSError as error:
        raise UsageError(f"{where}: cannot be read ({error.strerror or type(error).__name__})") from None


def _folder_records(path: Path, columns: Mapping[str, str], split: str, where: str) -> list[Record]:
    if (path / "dataset_dict.json").is_file():
        if split not in {entry.name for entry in path.iterdir() if entry.is_dir()}:
            found = ", ".join(sorted(one_line(entry.name) for entry in path.iterdir() if entry.is_dir()))
            raise UsageError(f"{where}: no split {one_line(split)}, found {found or 'none'}")
        path = path / split
    if (path / "state.json").is_file():
        _refuse_links([path, *path.iterdir()], where)
        rows = _guarded(lambda: _saved_rows(path, where), where, "not a readable dataset folder")
        return rows_to_records(rows, columns, where=where)
    records: list[Record] = []
    taken: set[str] = set()
    for file in _folder_files(path, split, where):
        label = f"{where}/{one_line(file.relative_to(path))}"
        records += rows_to_records(_read_file(file, label), columns, where=label, first=len(records), taken=taken)
    return records


def _folder_files(path: Path, split: str, where: str) -> list[Path]:
    """Data files of a folder, or of its `data` folder; of one kind, and of the split where the names tell splits."""
    for folder in (path, path / "data"):
        for endings in ((".parquet",), (".jsonl", ".ndjson"), (".json",)):
            if not folder.is_dir():
                continue
            files = sorted(file for file in folder.iterdir() if file.suffix.lower() in endings)
            if not files:
                continue
            named = [file for file in files if re.split(r"[^a-z]", file.stem.lower())[0] in _SPLIT_WORDS]
            if named or split != "train":
                files = [file for file in files if re.fullmatch(re.escape(split) + r"([^a-zA-Z].*)?", file.stem)]
            if not files:
                raise UsageError(f"{where}: no file of the split {one_line(split)}")
            _refuse_links([folder, *files] if folder != path else files, where)
            return files
    raise UsageError(f"{where}: the folder has no Parquet or JSON files and was not saved by `datasets`")


def _refuse_links(paths: list[Path], where: str) -> None:
    for path in paths:
        if path.is_symlink():
            raise UsageError(
                f"{where}: {one_line(path.name)} is a symbolic link, which is not followed inside a folder"
            )


def _saved_rows(path: Path, where: str) -> list[object]:
    """Rows of a folder written by `Dataset.save_to_disk`, as stored: no path in them is opened."""
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    for key in ("_data_files", "_indices_data_files"):
        for entry in state.get(key) or []:
            if Path(entry["filename"]).name != entry["filename"]:
                raise UsageError(f"{where}: state.json points outside the folder")
    import datasets

    return list(datasets.Dataset.load_from_disk(str(path)).with_format("arrow")[:].to_pylist())


def _read_hub(source: str, split: str, where: str) -> list[object]:
    repository, _, configuration = source.partition(":")

    def load() -> list[object]:
        import datasets

        return list(
            datasets.load_dataset(repository, configuration or None, split=split).with_format("arrow")[:].to_pylist()
        )

    problem = f"no such file, and the split {one_line(split)} of the hub dataset could not be loaded"
    return _guarded(load, where, problem)
