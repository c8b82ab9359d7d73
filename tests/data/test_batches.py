import json

import pytest

from expunge.data import EpochSampler, Row, batches_by_length, collate
from expunge.errors import UsageError


def row(length, identity="0"):
    return Row(identity, 0, tuple(range(1, length + 1)), (-100, *range(2, length + 1)), 1)


def test_masks_go_by_position_not_by_token_id():
    batch = collate([Row("0", 0, (5, 6, 7, 2), (-100, -100, 7, 2), 2)], pad_id=2, pad_to=6)
    assert batch.input_ids.tolist() == [[5, 6, 7, 2, 2, 2]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0]]
    assert batch.labels.tolist() == [[-100, -100, 7, 2, -100, -100]]


@pytest.mark.parametrize(("pad_to", "length"), [(1, 5), (4, 8), (5, 5), (32, 32)])
def test_length_is_a_multiple(pad_to, length):
    batch = collate([row(5), row(3)], pad_id=0, pad_to=pad_to, indices=[7, 4])
    assert batch.input_ids.shape == batch.labels.shape == batch.attention_mask.shape == (2, length)
    assert str(batch.input_ids.dtype) == str(batch.labels.dtype) == str(batch.attention_mask.dtype) == "torch.int64"
    assert batch.rows == (7, 4)
    assert batch.attention_mask.sum(1).tolist() == [5, 3]


def test_collate_refuses_nonsense():
    for rows, options in (
        ([], {"pad_id": 0}),
        ([row(2)], {"pad_id": -1}),
        ([row(2)], {"pad_id": 0, "pad_to": 0}),
        ([row(2)], {"pad_id": 0, "indices": [1, 2]}),
    ):
        with pytest.raises(ValueError, match=r"at least|indices"):
            collate(rows, **options)


def test_batches_by_length_have_every_row_once():
    rows = [row(length) for length in (3, 9, 2, 9, 5)]
    batches = batches_by_length(rows, batch_size=2, pad_id=0, pad_to=4)
    assert [batch.rows for batch in batches] == [(1, 3), (4, 0), (2,)]
    for batch in batches:
        for place, index in enumerate(batch.rows):
            assert tuple(batch.input_ids[place][batch.attention_mask[place] == 1].tolist()) == rows[index].input_ids
    assert batches_by_length([], batch_size=2, pad_id=0) == []
    with pytest.raises(ValueError, match="batch_size"):
        batches_by_length(rows, batch_size=0, pad_id=0)


def test_sampler_visits_every_item_once_a_pass():
    items = [3, 8, 11, 20, 21]
    sampler = EpochSampler(items, seed=1)
    assert sampler.epoch == 0
    passes = []
    for epoch in range(4):
        passes.append(sampler.next(3) + sampler.next(2))
        assert sorted(passes[-1]) == items
        assert sampler.epoch == epoch + 1
    assert len({tuple(order) for order in passes}) > 1
    assert len(EpochSampler(items, seed=1).next(12)) == 12


def test_sampler_is_seeded():
    def draw(seed):
        return EpochSampler(range(20), seed=seed).next(40)

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


@pytest.mark.parametrize("drawn", [0, 3, 5, 13])
def test_sampler_resumes(drawn):
    sampler = EpochSampler(range(5), seed=2)
    sampler.next(drawn)
    state = json.loads(json.dumps(sampler.state_dict()))
    other = EpochSampler(range(5), seed=99)
    other.next(1)
    other.load_state_dict(state)
    assert other.epoch == sampler.epoch
    assert other.next(11) == sampler.next(11)


def test_sampler_refuses_nonsense():
    with pytest.raises(ValueError, match="at least one"):
        EpochSampler([])
    with pytest.raises(ValueError, match="at least 0"):
        EpochSampler([1]).next(-1)
    with pytest.raises(UsageError, match="5 items, this run 4"):
        EpochSampler(range(4)).load_state_dict(EpochSampler(range(5)).state_dict())
