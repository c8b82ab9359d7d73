"""Every byte of a ledger counts, and what was changed is named."""

import json

import pytest
from tests.ledger._ledgers import ledger

from expunge.ledger._ledger import verify_bytes
from expunge.ledger._line import canonical, digest_of, make_line


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return ledger(tmp_path_factory.mktemp("ledger"), "one", "two").path.read_bytes()


@pytest.mark.parametrize("bit", [1, 32, 128])
def test_every_changed_byte_is_found_in_its_line(data, bit):
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= bit
        found = verify_bytes(bytes(changed))[1]
        assert not found.ok, place
        line = data[:place].count(b"\n") + 1
        assert line in {problem.line for problem in found.problems}, place
        assert min(problem.line for problem in found.problems) == line, place


def test_every_removed_and_doubled_byte_is_found(data):
    for place in range(0, len(data), 7):
        assert not verify_bytes(data[:place] + data[place + 1 :])[1].ok, place
        assert not verify_bytes(data[:place] + data[place : place + 1] + data[place:])[1].ok, place


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda line: line["fields"]["results"].update(left=7), "results"),
        (lambda line: line["fields"].update(at="2020-01-01T00:00:00Z"), "at"),
        (lambda line: line["fields"].update(more=1), "more"),
        (lambda line: line["fields"].pop("data"), "data"),
        (lambda line: line["digests"].update(config="0" * 64), "config"),
        (lambda line: line.update(hash="0" * 64), "hash"),
        (lambda line: line.update(signature="0" * 128), "signature"),
        (lambda line: line.update(extra=1), "extra"),
        (lambda line: line.pop("signature"), "signature"),
        (lambda line: line.update(digests=[]), "digests"),
    ],
)
def test_what_was_changed_is_named(data, change, named):
    lines = data.splitlines(keepends=True)
    line = json.loads(lines[1])
    change(line)
    found = verify_bytes(lines[0] + canonical(line) + b"\n" + lines[2])[1]
    assert (2, named) in {(problem.line, problem.field) for problem in found.problems}
    assert {problem.line for problem in found.problems} <= {2, 3}


def test_a_changed_field_does_not_accuse_the_signature(data):
    lines = data.splitlines(keepends=True)
    line = json.loads(lines[1])
    line["fields"]["versions"] = {}
    problems = verify_bytes(lines[0] + canonical(line) + b"\n" + lines[2])[1].problems
    assert [(problem.line, problem.field) for problem in problems] == [(2, "versions")]
    assert str(problems[0]) == "line 2: field 'versions' was changed"


def test_a_line_rewritten_whole_by_another_key_is_found(data):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    lines = data.splitlines(keepends=True)
    fields = json.loads(lines[2])["fields"]
    fields["results"]["left"] = 9
    forged = make_line(fields, Ed25519PrivateKey.generate())
    problems = verify_bytes(lines[0] + lines[1] + canonical(forged) + b"\n")[1].problems
    assert [(problem.line, problem.field) for problem in problems] == [(3, "signature")]


def test_removed_moved_and_doubled_lines_are_found(data):
    header, one, two = data.splitlines(keepends=True)
    for order in ([header, two], [header, two, one], [header, one, one, two], [one, two], [header, one, two, two]):
        assert not verify_bytes(b"".join(order))[1].ok


def test_what_is_no_ledger_is_refused():
    for wrong in (b"", b"\n", b"{}\n", b"[]\n", b"null\n", b'{"fields":{},"digests":{},"hash":"","signature":""}\n'):
        assert not verify_bytes(wrong)[1].ok, wrong
    assert not verify_bytes(b"[" * 100_000 + b"\n")[1].ok


def test_a_digest_is_of_the_value_alone():
    assert digest_of({"b": 1, "a": [1.5, "é"]}) == digest_of({"a": [1.5, "é"], "b": 1})
    assert digest_of(1) != digest_of(1.0)
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))
