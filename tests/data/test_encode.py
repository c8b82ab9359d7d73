import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expunge.data import Message, Record, encode_prompt, encode_records
from expunge.errors import UsageError


def chat(prompt, answer, identity="0"):
    return Record(identity, (Message("user", prompt), Message("assistant", answer)), None)


def raw(text, identity="0"):
    return Record(identity, None, text)


def labelled(row):
    return [token for token in row.labels if token != -100]


def one(record, tokenizer, **options):
    corpus = encode_records([record], tokenizer, **options)
    assert len(corpus.rows) == 1
    row = corpus.rows[0]
    assert len(row.input_ids) == len(row.labels)
    assert all(label in (-100, token) for label, token in zip(row.labels, row.input_ids, strict=True))
    assert row.labels[: row.prompt_length] == (-100,) * row.prompt_length
    assert row.labels[row.prompt_length] != -100
    return row


# ---- chat templates


def test_labels_are_answer_and_end_of_turn(chat_tokenizer):
    row = one(chat("A?", "B"), chat_tokenizer)
    assert chat_tokenizer.decode(labelled(row)) == "B<im_end>"
    assert row.input_ids[-1] == 3  # nothing after the end of turn


@pytest.mark.parametrize("answer", ["B", " B ", "end", "<im_end>", "assistant", "A?", "é東\n\nx", "user\nA?", "B\n"])
def test_any_answer_is_found(chat_tokenizer, answer):
    row = one(chat("A?", answer), chat_tokenizer)
    text = chat_tokenizer.decode(labelled(row))
    assert text.removesuffix("<im_end>").strip() == answer.strip()
    assert row.labels[-1] == 3


def test_one_bos_at_index_zero(make_bytes, templates):
    for name in ("llama", "gemma"):
        row = one(chat("Hi", "B"), make_bytes(templates[name], add_bos=True))
        assert row.input_ids.count(0) == 1
        assert row.input_ids[0] == 0


def test_encode_prompt_is_the_rows_prompt(chat_tokenizer):
    record = chat("Who is é?", "B")
    row = one(record, chat_tokenizer)
    prompt = encode_prompt(record, chat_tokenizer)
    assert prompt == list(row.input_ids[: row.prompt_length])
    assert encode_prompt("Who is é?", chat_tokenizer) == prompt
    turns = [{"role": "user", "content": "Who is é?"}]
    text = chat_tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == chat_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_only_the_last_answer_of_a_chat_is_labelled(chat_tokenizer):
    turns = (
        Message("user", "one"),
        Message("assistant", "same"),
        Message("user", "two"),
        Message("assistant", "same"),
    )
    row = one(Record("0", turns, None), chat_tokenizer)
    assert chat_tokenizer.decode(labelled(row)) == "same<im_end>"
    assert "two" in chat_tokenizer.decode(row.input_ids[: row.prompt_length])


def test_first_label_after_the_prompt_under_the_same_settings(make_words):
    tokenizer = make_words("q a", "{{ bos_token }}{% for m in messages %} {{ m.content }}{% endfor %} {{ eos_token }}")
    row = one(chat("q q", "a"), tokenizer)
    assert row.input_ids == (0, 3, 3, 4, 1)
    assert row.prompt_length == 3
    assert row.labels == (-100, -100, -100, 4, 1)


def test_pad_equal_to_end_of_turn_is_labelled(make_bytes, templates):
    tokenizer = make_bytes(templates["chatml"], eos="<im_end>")
    tokenizer.pad_token = "<im_end>"
    assert one(chat("A?", "B"), tokenizer).labels[-1] == tokenizer.pad_token_id


def test_tokenizer_is_left_as_it_is(make_bytes, templates):
    tokenizer = make_bytes(templates["chatml"])
    before = (len(tokenizer), tokenizer.pad_token, tokenizer.chat_template)
    one(chat("A?", "B"), tokenizer)
    assert (len(tokenizer), tokenizer.pad_token, tokenizer.chat_template) == before


def test_no_system_turn_by_default_and_given_one_arrives(chat_tokenizer):
    plain = one(chat("A?", "B"), chat_tokenizer)
    assert "system" not in chat_tokenizer.decode(plain.input_ids)
    row = one(chat("A?", "B"), chat_tokenizer, system="Be brief.")
    text = chat_tokenizer.decode(row.input_ids)
    assert text.count("Be brief.") == 1
    if "'System role not supported'" in chat_tokenizer.chat_template:
        assert "user\nBe brief.\n\nA?<im_end>" in text
    else:
        assert "<im_start>system" in text
    assert labelled(row) == labelled(plain)
    assert encode_prompt("A?", chat_tokenizer, system="Be brief.") == list(row.input_ids[: row.prompt_length])


def test_system_that_a_template_ignores_goes_to_the_user_turn(make_bytes, templates):
    ignoring = templates["chatml"].replace("messages %}", "messages if m.role != 'system' %}", 1)
    row = one(chat("A?", "B"), make_bytes(ignoring), system="Be brief.")
    assert "user\nBe brief.\n\nA?" in make_bytes().decode(row.input_ids)


def test_own_system_turn_wins(make_bytes, templates):
    tokenizer = make_bytes(templates["chatml"])
    turns = (Message("system", "own"), Message("user", "A?"), Message("assistant", "B"))
    text = tokenizer.decode(one(Record("0", turns, None), tokenizer, system="given").input_ids)
    assert "own" in text
    assert "given" not in text


def test_think_block_before_the_answer_is_prompt(make_bytes, templates):
    thinking = templates["chatml"].replace(
        "{{ m.content }}", "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content }}"
    )
    tokenizer = make_bytes(thinking)
    record = chat("A?", "B")
    row = one(record, tokenizer)
    assert tokenizer.decode(labelled(row)) == "B<im_end>"
    assert encode_prompt("A?", tokenizer) == list(row.input_ids[: row.prompt_length])


def test_end_of_turn_that_is_not_special_and_swallows_white_space(make_bytes, templates):
    from tokenizers import AddedToken

    tokenizer = make_bytes(templates["chatml"].replace("<im_end>", "<stop>"))
    tokenizer.add_tokens([AddedToken("<stop>", lstrip=True, special=False)])
    row = one(chat("A?", "B "), tokenizer)
    assert row.labels[-1] == tokenizer.convert_tokens_to_ids("<stop>")
    row = one(chat("A?", "B "), tokenizer, template="{prompt}>{completion}<stop>")
    assert tokenizer.decode(labelled(row)) == "B<stop>"  # and no end-of-sequence token after it


def test_template_without_end_of_turn_gets_eos(make_bytes):
    tokenizer = make_bytes("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert tokenizer.decode(labelled(one(chat("A?", "B"), tokenizer))) == "B<eos>"


def test_end_of_turn_written_as_ordinary_text_is_labelled(make_bytes):
    tokenizer = make_bytes("{% for m in messages %}{{ m.role }}: {{ m.content }} [END]\n{% endfor %}")
    assert tokenizer.decode(labelled(one(chat("A?", "B"), tokenizer))) == "B [END]"


def test_template_that_rewrites_the_answer(make_bytes, templates):
    upper = templates["chatml"].replace("{{ m.content }}", "{{ m.content | upper }}")
    with pytest.raises(UsageError, match="does not show the answer"):
        one(chat("A?", "secret"), make_bytes(upper))
    depends = templates["chatml"].replace("{{ m.content }}", "{{ m.content | length }} {{ m.content }}")
    tokenizer = make_bytes(depends)
    assert tokenizer.decode(labelled(one(chat("A?", "secret"), tokenizer))) == "secret<im_end>"


def test_template_errors_are_one_line_and_do_not_quote_the_row(make_bytes):
    tokenizer = make_bytes("{{ raise_exception('bad: ' + messages[0].content) }}")
    with pytest.raises(UsageError, match="refuses the turns user, assistant") as caught:
        one(chat("my secret", "B"), tokenizer)
    assert "secret" not in str(caught.value)
    tokenizer = make_bytes("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="roles must alternate"):
        one(chat("my secret", "B"), tokenizer)


def test_no_chat_template(make_bytes):
    with pytest.raises(UsageError, match="--template plain"):
        encode_records([chat("A?", "B")], make_bytes())
    with pytest.raises(UsageError, match="--template plain"):
        encode_prompt("A?", make_bytes())
    assert encode_records([raw("abc")], make_bytes()).rows  # raw text needs none


class WithoutOffsets:
    """A tokenizer that has no offsets mapping, as the Python ones; or whose template call knows ids only."""

    def __init__(self, inner, as_ids=None):
        self.inner, self.as_ids, self.is_fast = inner, as_ids, False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, text, **options):
        assert "return_offsets_mapping" not in options
        return self.inner(text, **options)

    def apply_chat_template(self, turns, **options):
        if self.as_ids is None:
            return self.inner.apply_chat_template(turns, **options)
        options["tokenize"] = True
        output = self.inner.apply_chat_template(turns, **options)
        return self.as_ids(output["input_ids"])


@pytest.mark.parametrize("answer", ["B", "é東 x", "A?"])
def test_slow_tokenizer_gives_the_same_rows(chat_tokenizer, answer):
    slow = WithoutOffsets(chat_tokenizer)
    for template in ("chat", "plain", "{prompt} -> {completion}"):
        record = chat("A?", answer)
        assert one(record, slow, template=template) == one(record, chat_tokenizer, template=template)


@pytest.mark.parametrize(
    "as_ids",
    [list, lambda ids: {"input_ids": ids}, lambda ids: {"input_ids": [ids]}],
    ids=["list", "mapping", "nested"],
)
def test_template_call_may_return_ids(chat_tokenizer, as_ids):
    record = chat("A?", "B")
    assert one(record, WithoutOffsets(chat_tokenizer, as_ids)) == one(record, chat_tokenizer)


def test_prompt_length_of_a_mapping():
    class Fixed:
        is_fast, eos_token_id, all_special_ids = False, 9, (9,)

        def apply_chat_template(self, turns, *, tokenize, add_generation_prompt):
            return {"input_ids": [1, 2, 3] if add_generation_prompt else [1, 2, 3, 7, 9, 4]}

    row = one(chat("A?", "B"), Fixed())
    assert row.prompt_length == 3
    assert row.labels == (-100, -100, -100, 7, 9)


# ---- plain and user templates


def test_plain_template(make_bytes):
    tokenizer = make_bytes(add_bos=True)
    row = one(chat("A?", "B"), tokenizer, template="plain")
    assert tokenizer.decode(row.input_ids) == "<bos>Question: A?\nAnswer: B<eos>"
    assert tokenizer.decode(labelled(row)) == "B<eos>"


def test_token_that_joins_space_and_answer(make_bytes):
    tokenizer = make_bytes(merges=(("Ġ", "B"),))
    record = chat("A?", "B")
    row = one(record, tokenizer, template="plain")
    assert tokenizer.convert_ids_to_tokens(labelled(row)) == ["ĠB", "<eos>"]
    assert encode_prompt(record, tokenizer, template="plain") == list(row.input_ids[: row.prompt_length])
    assert one(record, WithoutOffsets(tokenizer), template="plain") == row


def test_plain_template_with_history_and_system(make_bytes):
    tokenizer = make_bytes()
    turns = (Message("user", "one"), Message("assistant", "1"), Message("user", "two"), Message("assistant", "2"))
    row = one(Record("0", turns, None), tokenizer, template="plain", system="Count.")
    text = "Count.\n\nQuestion: one\nAnswer: 1\n\nQuestion: two\nAnswer: 2<eos>"
    assert tokenizer.decode(row.input_ids) == text
    assert tokenizer.decode(labelled(row)) == "2<eos>"


def test_user_template(make_bytes):
    tokenizer = make_bytes(add_bos=True)
    row = one(chat("{completion}", "B{x}"), tokenizer, template="<bos>[Q] {prompt} [A]{completion}<im_end>\n")
    assert tokenizer.decode(row.input_ids) == "<bos>[Q] {completion} [A]B{x}<im_end>"
    assert tokenizer.decode(labelled(row)) == "B{x}<im_end>"
    row = one(chat("A?", "B"), tokenizer, template="{prompt}>{completion} .")
    assert tokenizer.decode(labelled(row)) == "B .<eos>"


def test_tokenizer_that_adds_eos_itself(make_bytes):
    tokenizer = make_bytes(add_eos=True)
    for either in (tokenizer, WithoutOffsets(tokenizer)):
        assert tokenizer.decode(labelled(one(chat("A?", "B"), either, template="plain"))) == "B<eos>"


@pytest.mark.parametrize("template", ["chatml", "", "{prompt}", "{completion}{prompt}", "{prompt}{prompt}{completion}"])
def test_unusable_templates(make_bytes, template):
    with pytest.raises(UsageError, match=r"use chat, plain"):
        encode_records([chat("A?", "B")], make_bytes(), template=template)
    with pytest.raises(UsageError, match=r"use chat, plain"):
        encode_prompt("A?", make_bytes(), template=template)


def test_empty_prompt_has_no_unpredicted_label(make_bytes):
    tokenizer = make_bytes()
    row = one(chat("", "BC"), tokenizer, template="{prompt}{completion}")
    assert row.labels[0] == -100
    assert encode_prompt("", tokenizer, template="{prompt}{completion}") == [0]


# ---- length


def test_long_prompt_is_cut_from_its_start(make_words):
    words = " ".join(f"p{i}" for i in range(12)) + " a1 a2 a3"
    tokenizer = make_words(words)
    prompt = " ".join(f"p{i}" for i in range(12))
    corpus = encode_records([chat(prompt, "a1 a2 a3")], tokenizer, template="{prompt} {completion}", max_length=10)
    row = corpus.rows[0]
    assert len(row.input_ids) == 10
    assert labelled(row) == [15, 16, 17, 1]
    assert row.input_ids[:6] == tuple(range(9, 15))
    assert corpus.truncated == 1
    assert encode_prompt(prompt, tokenizer, template="{prompt} {completion}", max_length=5) == list(range(10, 15))
    fits = encode_records([chat(prompt, "a1 a2 a3")], tokenizer, template="{prompt} {completion}", max_length=16)
    assert fits.truncated == 0


def test_cut_keeps_bos(make_bytes, templates):
    tokenizer = make_bytes(templates["llama"], add_bos=True)
    row = one(chat("x" * 50, "B"), tokenizer, max_length=20)
    assert len(row.input_ids) == 20
    assert row.input_ids[0] == 0
    assert tokenizer.decode(row.input_ids[1:]).endswith("assistant\n\nB<im_end>")
    prompt = encode_prompt("x" * 50, tokenizer, max_length=20)
    assert len(prompt) == 20
    assert prompt[0] == 0
    assert one(chat("x" * 50, "B"), tokenizer, max_length=3).input_ids[-2:] == row.input_ids[-2:]


def test_too_long_answer_is_refused(make_bytes):
    records = [chat("A?", "B", "short"), chat("A?", "secret word", "long")]
    with pytest.raises(UsageError, match=r"row id long has 12 tokens, max_length 12 has room for 11") as caught:
        encode_records(records, make_bytes(), template="plain", max_length=12, name="forget")
    assert "secret" not in str(caught.value)
    assert "13 or more" in str(caught.value)
    assert encode_records(records, make_bytes(), template="plain", max_length=13).truncated == 2


@pytest.mark.parametrize("max_length", [1, 0, -5])
def test_useless_max_length(make_bytes, max_length):
    with pytest.raises(UsageError, match="at least 2"):
        encode_records([raw("abc")], make_bytes(), max_length=max_length)


# ---- empty answers


def test_empty_answers_are_dropped_and_counted(make_bytes):
    records = [chat("A?", "", "a"), chat("A?", "B", "b"), raw(" \n", "c")]
    corpus = encode_records(records, make_bytes(), template="plain")
    assert [(row.id, row.record) for row in corpus.rows] == [("b", 1)]
    assert [(drop.id, drop.reason) for drop in corpus.dropped] == [("a", "empty answer"), ("c", "empty answer")]


def test_nothing_left(make_bytes):
    with pytest.raises(UsageError, match="all 1 rows"):
        encode_records([chat("A?", " ")], make_bytes(), template="plain")
    with pytest.raises(UsageError, match="nothing to label"):
        encode_records([], make_bytes())


# ---- raw text


def test_raw_text_follows_the_tokenizers_own_rule(make_bytes):
    for adds in (True, False):
        row = one(raw("Once upon"), make_bytes(add_bos=adds))
        assert row.input_ids.count(0) == int(adds)
        assert row.prompt_length == 1


def test_one_token_text_has_nothing_to_label(make_bytes):
    corpus = encode_records([raw("x"), raw("xy")], make_bytes())
    assert [drop.reason for drop in corpus.dropped] == ["no token to label"]


@pytest.mark.parametrize("max_length", [2, 3, 4, 7, 8, 40])
def test_windows_label_every_token_once(make_bytes, max_length):
    tokenizer = make_bytes(add_eos=True)
    text = "The quick brown fox jumps over it."
    ids = tokenizer(text)["input_ids"]
    corpus = encode_records([raw("ab"), raw(text)], tokenizer, max_length=max_length)
    windows = [row for row in corpus.rows if row.record == 1]
    assert [token for row in windows for token in labelled(row)] == ids[1:]
    assert max(len(row.input_ids) for row in windows) <= max_length
    for before, after in itertools.pairwise(windows):
        assert 1 <= after.prompt_length <= max(1, max_length // 4)
        assert before.input_ids[-after.prompt_length :] == after.input_ids[: after.prompt_length]
    assert ids.count(1) == 1


def test_prompt_of_raw_text_is_its_first_half(make_bytes):
    tokenizer = make_bytes()
    assert tokenizer.decode(encode_prompt(raw("abcdefg"), tokenizer)) == "abc"
    assert tokenizer.decode(encode_prompt(raw("abcdefg"), tokenizer, max_length=2)) == "bc"
    assert tokenizer.decode(encode_prompt(raw("a"), tokenizer)) == "a"


# ---- properties

TEXT = st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=TEXT, answer=TEXT.filter(str.strip), template=st.sampled_from(["chat", "plain", "{prompt} => {completion}"])
)
def test_labels_decode_to_the_answer(chat_tokenizer, prompt, answer, template):
    row = one(chat(prompt, answer), chat_tokenizer, template=template)
    end = "<im_end>" if template == "chat" else chat_tokenizer.eos_token
    decoded = chat_tokenizer.decode(labelled(row), clean_up_tokenization_spaces=False)
    assert decoded.removesuffix(end).strip() == answer.strip()
    assert row.input_ids[-1] == chat_tokenizer.convert_tokens_to_ids(end)
    json.dumps(row.labels)


PIECES = st.sampled_from(
    [
        "{prompt}",
        "{completion}",
        "{",
        "}",
        "{0}",
        "{prompt!r}",
        "{prompt.x}",
        "{{",
        "}}",
        "%s",
        "\n",
        " ",
        "a",
        "é",
        "<im_end>",
    ]
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(template=st.lists(PIECES, max_size=6).map("".join), prompt=TEXT, answer=TEXT.filter(str.strip))
def test_any_template_text_is_used_or_refused(chat_tokenizer, template, prompt, answer):
    try:
        row = one(chat(prompt, answer), chat_tokenizer, template=template)
    except UsageError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        assert "template" in message
    else:
        decoded = chat_tokenizer.decode(labelled(row), clean_up_tokenization_spaces=False)
        assert answer.strip() in decoded or decoded.strip() in answer


JINJA = st.sampled_from(
    [
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m['content'] }}",
        "{{ m['role'] }}",
        "{{ messages[0]['content'] }}",
        "{{ messages[1]['content'] | upper }}",
        "{{ m.content[::-1] }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{% if add_generation_prompt %}assistant {% endif %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ lipsum.__globals__ }}",
        "{% set x = 'y' * 9999 %}",
        "{% ",
        "<im_end>",
        " ",
    ]
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(template=st.lists(JINJA, max_size=7).map("".join), answer=TEXT.filter(str.strip))
def test_any_chat_template_is_used_or_refused(make_bytes, template, answer):
    """A model's template is code from somebody else: it runs in a sandbox, and what it gets wrong is said in a line."""
    tokenizer = make_bytes(template)
    try:
        row = one(chat("A?", answer), tokenizer)
    except UsageError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        assert answer not in message or len(answer) < 3
    else:
        assert labelled(row)
