"""`expunge ledger`: the signed list of deletion requests."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from expunge.cli._parser import Pairs, Parser
from expunge.cli._show import ProgressLine, console
from expunge.errors import RunError, UsageError
from expunge.ledger import (
    Ledger,
    Match,
    Verification,
    entry_from_run,
    is_receipt,
    read_receipt,
    verify_receipt,
)

LEDGER = """keep and check the signed list of deletion requests

examples:
  expunge ledger add deletions run --request ticket-17  add a finished run
  expunge ledger show deletions                         list the requests
  expunge ledger verify deletions                       check every byte
  expunge ledger verify deletions --request ticket-17 --model run/model
  expunge ledger verify deletions --model run/model --measure forget.jsonl
  expunge ledger export deletions --request ticket-17 --out receipt.json
  expunge ledger verify receipt.json --public-key HEX   needs nothing else
  expunge ledger prove deletions --text-file mine.txt   is it in a request?

exit code: 0 as it was written (prove: found); 1 changed (prove: not found);
2 wrong input"""

# Means of the same weights on two processors differ by less.
_ROUNDED = 0.01
_ACTIONS = {
    "add": "sign a finished run and add it",
    "show": "list the requests, or show one",
    "verify": "check a ledger or a receipt",
    "export": "write the receipt of one request",
    "prove": "find a text in the requests by its keyed hash",
}


def add_ledger(parser: argparse.ArgumentParser) -> None:
    """Options of `expunge ledger`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    made = {name: actions.add_parser(name, help=text, description=text) for name, text in _ACTIONS.items()}
    for name, one in made.items():
        what = "ledger file, its folder, or a receipt" if name == "verify" else "ledger file or its folder"
        one.add_argument("path", metavar="FILE_OR_DIR", help=what)
        one.add_argument("--json", action="store_true", help="print JSON")
        if name in ("add", "prove"):
            one.add_argument("--keys", metavar="DIR", help="folder of the keys [beside the ledger]")
        if name in ("show", "verify", "export", "prove"):
            needed = name == "export"
            one.add_argument("--request", metavar="ID", required=needed, help="name or number of a request [all]")
    made["add"].add_argument("run", metavar="RUN", help="folder of a finished run")
    made["add"].add_argument("--request", metavar="ID", required=True, help="name of the request")
    made["add"].add_argument(
        "--forget", metavar="FILE", help="what was forgotten [as the run says]; only hashes are kept"
    )
    verify = made["verify"]
    verify.add_argument("--head", metavar="HASH", help="hash of a line that must still be there")
    verify.add_argument("--receipt", metavar="FILE", nargs="+", default=[], help="receipts whose entries must be there")
    verify.add_argument("--public-key", metavar="HEX", help="key it must be signed with [the one it names]")
    verify.add_argument("--model", metavar="DIR", help="model that must be the one of --request, or of the newest")
    verify.add_argument("--measure", metavar="FILE", help="what was forgotten: measure --model on it again and compare")
    verify.add_argument(
        "--columns", nargs="+", action=Pairs, metavar="OURS=THEIRS", help="names in that file [prompt, completion, …]"
    )
    verify.add_argument("--text-file", metavar="FILE", help="text that the receipt must prove to have been in it")
    made["export"].add_argument("--out", metavar="FILE", help="receipt to write [standard output]")
    made["prove"].add_argument("--text-file", metavar="FILE", required=True, help="one example, or its answer")
    made["prove"].add_argument("--out", metavar="FILE", help="receipt to write that proves it to others")


def run_ledger(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    run = {"add": _add, "show": _show, "verify": _verify, "export": _export, "prove": _prove}
    return run[arguments.action](arguments)


def _add(arguments: argparse.Namespace) -> int:
    entry = entry_from_run(arguments.run, arguments.request, forget=arguments.forget)
    ledger = Ledger(arguments.path, keys=arguments.keys)
    line = ledger.append(entry)
    if arguments.json:
        _print_json(line)
        return 0
    fields = line["fields"]
    out = console()
    out.print(f"entry {fields['number']}: {fields['request']}, {fields['rows']['count']} rows", markup=False)
    out.print(f"ledger: {ledger.path}", markup=False, soft_wrap=True)
    out.print(f"head: {line['hash']}", markup=False, soft_wrap=True)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    ledger = Ledger(arguments.path)
    if arguments.request is not None:
        fields = ledger.entry(arguments.request)["fields"]
        # The keyed hashes are of use to machines only.
        shown = fields if arguments.json else fields | {"rows": {"count": fields["rows"]["count"]}}
        _print_json(shown)
        return 0
    entries = ledger.entries()
    if arguments.json:
        _print_json([entry["fields"] for entry in entries])
        return 0
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "request", "when (UTC)", "rows", "result", "model after"):
        table.add_column(name, justify="right" if name in ("", "rows") else "left", overflow="fold")
    for entry in entries:
        fields = entry["fields"]
        result = "forgotten" if fields["results"]["forgotten"] else f"{fields['results']['left']} left"
        cells = [str(fields["number"]), fields["request"], fields["at"][:16].replace("T", " ")]
        after = fields["model_after"]["fingerprint"][:12]
        table.add_row(*map(_plain, [*cells, str(fields["rows"]["count"]), result, after]))
    out = console()
    out.print(table)
    out.print(f"\npublic key: {ledger.lines()[0]['fields']['public_key']}", markup=False, soft_wrap=True)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.measure is not None and arguments.model is None:
        raise UsageError("measure: found no --model, accepted with it is the model to measure")
    if arguments.columns is not None and arguments.measure is None:
        raise UsageError("columns: found no --measure, accepted with it is the file they are in")
    if is_receipt(arguments.path):
        text = None if arguments.text_file is None else _read(arguments.text_file)
        receipt = read_receipt(arguments.path)
        found = verify_receipt(receipt, public_key=arguments.public_key, text=text)
        what, entry = "receipt", receipt.get("entry")
        refused = [f"--{name}" for name in ("head", "receipt") if getattr(arguments, name)]
    else:
        refused = ["--text-file"] if arguments.text_file else []
        ledger = Ledger(arguments.path)
        receipts = [read_receipt(path) for path in arguments.receipt]
        found = ledger.verify(head=arguments.head, public_key=arguments.public_key, receipts=receipts)
        what, entry = "ledger", None
        if found.ok and arguments.model is not None:
            entries = ledger.entries()
            if not entries:
                raise UsageError("model: found a ledger without entries, accepted is one with the model's request")
            entry = entries[-1] if arguments.request is None else ledger.entry(arguments.request)
    if refused:
        raise UsageError(f"{refused[0]}: does not go with a {what}")
    model = _check_model(arguments.model, entry["fields"]) if found.ok and arguments.model and entry else None
    measured = None
    if model is not None and model[0] and entry is not None and arguments.measure is not None:
        measured = _measure(arguments, entry["fields"])
    return _tell(arguments, what, found, model, measured)


def _check_model(folder: str, fields: dict[str, Any]) -> tuple[bool, str]:
    """Whether the weights of a folder are those of an entry."""
    from expunge.lm import load_model

    fingerprint = load_model(folder, dtype="auto", device="cpu").fingerprint
    if fingerprint == fields["model_after"]["fingerprint"]:
        return True, f"the model is the one that request {fields['request']} ended with"
    if fingerprint == fields["model_before"]["fingerprint"]:
        return False, f"the model is the one from before request {fields['request']}: nothing was removed from it"
    return False, f"the model is another than the one that request {fields['request']} ended with"


@dataclass(frozen=True)
class _Measured:
    """What the model gives now beside what the entry says: name → (now, then)."""

    pairs: dict[str, tuple[float | None, float | None]]

    @property
    def ok(self) -> bool:
        return all(_alike(name, *pair) for name, pair in self.pairs.items())

    def lines(self) -> list[str]:
        shown = {name: [_number(value) for value in pair] for name, pair in self.pairs.items()}
        texts = [f"{name} {now} (entry: {then})" for name, (now, then) in shown.items()]
        wrong = [name for name, pair in self.pairs.items() if not _alike(name, *pair)]
        result = f"DIFFERENT in {', '.join(wrong)}" if wrong else "as the entry says"
        return [f"measured again: {', '.join(texts)}", f"the numbers are {result}"]


def _measure(arguments: argparse.Namespace, fields: dict[str, Any]) -> _Measured:
    from expunge.train import remeasure

    config, then = fields["config"], fields["results"]["forget_after"]
    with ProgressLine().showing() as line:
        found = remeasure(
            arguments.model,
            arguments.measure,
            config,
            config["resolved_masc"],
            columns=arguments.columns,
            progress=line,
        )
    now = dataclasses.asdict(found.summary)
    pairs = {name: (now[name], then[name]) for name in ("examples", "probability", "exact", "violation")}
    if found.left is not None:
        pairs["left"] = (found.left, fields["results"]["left"])
    return _Measured(pairs)


def _alike(name: str, now: float | None, then: float | None) -> bool:
    """Counts are equal; means may differ by what another processor rounds otherwise."""
    if now is None or then is None:
        return now is then
    return now == then if name in ("examples", "left") else abs(now - then) <= _ROUNDED


def _number(value: float | None) -> str:
    return "not measured" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"


def _tell(
    arguments: argparse.Namespace,
    what: str,
    found: Verification,
    model: tuple[bool, str] | None,
    measured: _Measured | None,
) -> int:
    ok = found.ok and (model is None or model[0]) and (measured is None or measured.ok)
    if arguments.json:
        problems = [{"line": one.line, "field": one.field, "text": one.text} for one in found.problems]
        values = {"ok": ok, "problems": problems, "entries": found.entries, "head": found.head}
        values |= {"public_key": found.public_key, "model": None if model is None else model[1]}
        again = None if measured is None else {name: list(pair) for name, pair in measured.pairs.items()}
        _print_json(values | {"measured": again})
        return 0 if ok else 1
    out = console()
    for problem in found.problems:
        out.print(str(problem), markup=False, soft_wrap=True)
    if found.ok:
        count = f"{found.entries} {'entry' if found.entries == 1 else 'entries'}"
        out.print(f"{what}: as it was written ({count}; hashes, chain and signatures fit)", markup=False)
        out.print(f"head: {found.head}", markup=False, soft_wrap=True)
        source = "the one given" if arguments.public_key else "the one it names: compare it with one you know"
        out.print(f"public key: {found.public_key} ({source})", markup=False, soft_wrap=True)
    else:
        out.print(f"{what}: CHANGED ({len(found.problems)} found)", markup=False)
    if model is not None:
        out.print(model[1], markup=False, soft_wrap=True)
    for line in [] if measured is None else measured.lines():
        out.print(line, markup=False, soft_wrap=True)
    return 0 if ok else 1


def _export(arguments: argparse.Namespace) -> int:
    _write(Ledger(arguments.path).receipt(arguments.request), arguments.out)
    return 0


def _prove(arguments: argparse.Namespace) -> int:
    ledger = Ledger(arguments.path, keys=arguments.keys)
    matches = ledger.prove(_read(arguments.text_file), request=arguments.request)
    if matches and arguments.out is not None:
        _write(ledger.receipt(str(matches[-1].number), opened=_of_one(matches)), arguments.out)
    if arguments.json:
        _print_json([{"number": m.number, "request": m.request, "row": m.row, "part": m.part} for m in matches])
        return 0 if matches else 1
    out = console()
    for match in matches:
        where = "the answer of row" if match.part == "answer" else "row"
        out.print(f"entry {match.number}: {where} {match.row + 1} of request {match.request}", markup=False)
    if not matches:
        out.print("not found: no request holds this text as an example or as an answer")
    return 0 if matches else 1


def _of_one(matches: list[Match]) -> list[Match]:
    return [match for match in matches if match.number == matches[-1].number]


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"text-file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"text-file: {path} is no UTF-8, accepted is a text file") from None


def _write(values: dict[str, Any], path: str | None) -> None:
    if path is None:
        _print_json(values)
        return
    try:
        Path(path).expanduser().write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"out: cannot write {path}: {error.strerror}") from None
    console().print(f"receipt: {path}", markup=False, soft_wrap=True)


def _print_json(values: Any) -> None:
    sys.stdout.write(json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def _plain(text: str) -> str:
    """Text for a table, whose brackets are no markup."""
    return text.replace("[", r"\[")
