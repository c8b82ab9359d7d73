"""Reading examples, checking them, and turning them into labelled token rows and batches.

Knows tokenizers, not models.
"""

from expunge.data._batches import Batch, EpochSampler, batches_by_length, collate
from expunge.data._checks import DataReport, check_pair, normalise
from expunge.data._encode import IGNORE, Corpus, Dropped, Row, encode_prompt, encode_records
from expunge.data._read import is_hub_name, read_records, read_rows
from expunge.data._records import Message, Record
from expunge.data._refusals import read_refusals, refuse
from expunge.data._templates import PLAIN_TEMPLATE, token_ids

__all__ = [
    "IGNORE",
    "PLAIN_TEMPLATE",
    "Batch",
    "Corpus",
    "DataReport",
    "Dropped",
    "EpochSampler",
    "Message",
    "Record",
    "Row",
    "batches_by_length",
    "check_pair",
    "collate",
    "encode_prompt",
    "encode_records",
    "is_hub_name",
    "normalise",
    "read_records",
    "read_refusals",
    "read_rows",
    "refuse",
    "token_ids",
]
