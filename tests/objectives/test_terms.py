"""Every term of the registry, by the same list of checks."""

import dataclasses
import math

import pytest
import torch
from tests.objectives._plain import PLAIN, inputs_of, plain_ce_u, random_case, rows_of

from expunge.errors import UsageError
from expunge.objectives import FORGET_TERMS, RETAIN_TERMS, Option, SumCount, Term, TermInputs, ce_u

TERMS = {**FORGET_TERMS, **RETAIN_TERMS}
NAMES = sorted(set(TERMS) - {"none"})
FREE_OF_WEIGHTS = [
    name for name in NAMES if name not in ("wga", "satimp")
]  # their weights carry no gradient, by design
# Values other than the defaults.
CHANGED = {
    "wga": {"beta": 2.0},
    "satimp": {"beta1": 2.0, "beta2": 0.5},
    "npo": {"beta": 0.7},
    "npo-norm": {"beta": 0.7},
    "tnpo": {"beta": 0.7},
    "simnpo": {"beta": 0.7, "gamma": 0.4},
    "dpo": {"beta": 0.7},
    "ap": {"beta": 0.7},
    "rmu": {"c": 2.0},
    "masc": {"rho": 0.4, "eta": 0.6},
}


def gradients(loss, case):
    found = torch.autograd.grad(loss, case.leaves(), allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, case.leaves(), strict=True)]


def test_every_term_has_a_definition_to_be_compared_with():
    assert sorted(PLAIN) == NAMES
    assert set(CHANGED) == {n for n in NAMES if any(o.of == "loss" for o in TERMS[n].options.values())}


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition_on_padded_logits(name, changed):
    options = CHANGED.get(name, {}) if changed else {}
    case = random_case(1)
    found = TERMS[name](inputs_of(case), **options).mean()
    plain = PLAIN[name](case, **options)
    if name != "ce-u":  # whose value leaves a constant out: below
        torch.testing.assert_close(found, plain)
    for ours, theirs in zip(gradients(found, case), gradients(plain, case), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_ce_u_has_the_value_of_the_paper_where_the_entropy_is_given():
    case = random_case(2)
    inputs = inputs_of(case)
    found = ce_u(inputs.logprob, inputs.rows, inputs.n_rows, entropy=inputs.entropy).mean()
    torch.testing.assert_close(found, plain_ce_u(case))


@pytest.mark.parametrize("name", NAMES)
def test_masked_places_change_neither_value_nor_gradient(name):
    case = random_case(3)
    other = random_case(4)
    answer = torch.cat([case.labels[:, 1:] != -100, torch.zeros(4, 1, dtype=torch.bool)], 1)[..., None]
    refusal = torch.cat([case.refusal_labels[:, 1:] != -100, torch.zeros(4, 1, dtype=torch.bool)], 1)[..., None]
    changed = dataclasses.replace(
        case,
        logits=torch.where(answer, case.logits, other.logits).detach().requires_grad_(),
        reference=torch.where(answer, case.reference, other.reference),
        refusal_logits=torch.where(refusal, case.refusal_logits, other.refusal_logits).detach().requires_grad_(),
        refusal_reference=torch.where(refusal, case.refusal_reference, other.refusal_reference),
        hidden=torch.where(answer, case.hidden, other.hidden).detach().requires_grad_(),
        hidden_reference=torch.where(answer, case.hidden_reference, other.hidden_reference),
    )
    a, b = TERMS[name](inputs_of(case)), TERMS[name](inputs_of(changed))
    assert torch.equal(a.total, b.total)
    assert a.terms == b.terms
    masks = (answer, refusal, answer)
    for x, y, mask in zip(gradients(a.mean(), case), gradients(b.mean(), changed), masks, strict=True):
        assert torch.equal(x, y)
        assert not x[~mask.expand_as(x)].any()


@pytest.mark.parametrize("name", FREE_OF_WEIGHTS)
def test_gradcheck(name):
    inputs = inputs_of(random_case(5))
    term = TERMS[name]
    free = [n for n in term.needs if n.removesuffix("_rows") == n and n not in ("vocabulary", "direction")]
    free = [n for n in free if not n.startswith("ref_")]
    values = [getattr(inputs, n).detach().clone().requires_grad_() for n in free]

    def loss(*given):
        return term(dataclasses.replace(inputs, **dict(zip(free, given, strict=True)))).mean()

    assert torch.autograd.gradcheck(loss, values)


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_reaches_the_reference(name):
    inputs = inputs_of(random_case(6))
    kept = {n: getattr(inputs, n).detach().requires_grad_() for n in ("ref_logprob", "ref_refusal_logprob")}
    kept["ref_activation"] = inputs.ref_activation.clone().requires_grad_()
    kept["direction"] = inputs.direction.clone().requires_grad_()
    loss = TERMS[name](dataclasses.replace(inputs, **kept)).mean()
    assert all(g is None for g in torch.autograd.grad(loss, list(kept.values()), allow_unused=True))


@pytest.mark.parametrize("split", [[[0], [1], [2], [3]], [[0, 2], [1, 3]], [[2], [0, 1, 3]]])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_does_not_depend_on_the_split_into_micro_batches(name, split):
    case, term = random_case(7), TERMS[name]
    whole = term(inputs_of(case))
    parts = [term(inputs_of(rows_of(case, rows))) for rows in split]
    joined = SumCount(sum(part.total for part in parts), sum(part.terms for part in parts))
    assert joined.terms == whole.terms
    torch.testing.assert_close(joined.mean(), whole.mean(), rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(joined.mean(), case), gradients(whole.mean(), case), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*NAMES, "none"])
def test_count_is_known_before_the_statistics(name):
    inputs = inputs_of(random_case(8))
    found = TERMS[name].count(inputs.rows, inputs.n_rows, inputs.refusal_rows)
    assert found == TERMS[name](inputs).terms
    assert found == {"token": 8, "row": 2 if name in ("dpo", "ap") else 3, "refusal_token": 6}[TERMS[name].per] * (
        name != "none"
    )


@pytest.mark.parametrize("name", NAMES)
def test_nothing_labelled_gives_a_zero_attached_to_the_graph(name):
    case = random_case(9)
    empty = dataclasses.replace(
        case,
        labels=torch.full_like(case.labels, -100),
        refusal_labels=torch.full_like(case.refusal_labels, -100),
    )
    found = TERMS[name](inputs_of(empty))
    assert (found.total.item(), found.terms) == (0.0, 0)
    found.mean().backward()
    grads = [leaf.grad for leaf in case.leaves() if leaf.grad is not None]
    assert grads
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("name", NAMES)
def test_one_token(name):
    case = random_case(10)
    one = dataclasses.replace(case, labels=torch.full_like(case.labels, -100))
    one.labels[1, 4] = 3
    found = TERMS[name](inputs_of(one))
    if name != "ce-u":
        torch.testing.assert_close(found.mean(), PLAIN[name](one))
    assert found.mean().isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_upcast(name, dtype):
    inputs = inputs_of(random_case(11))
    values = {n: v for n, v in vars(inputs).items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    half = {n: v.detach().to(dtype) for n, v in values.items()}
    found = TERMS[name](dataclasses.replace(inputs, **half))
    up = TERMS[name](dataclasses.replace(inputs, **{n: v.float() for n, v in half.items()}))
    assert found.total.dtype == torch.float32
    assert torch.equal(found.total, up.total)
    assert TERMS[name](inputs).total.dtype == torch.float64


@pytest.mark.parametrize("name", NAMES)
def test_inputs_stay_as_they_are(name):
    inputs = inputs_of(random_case(12))
    before = {n: v.clone() for n, v in vars(inputs).items() if isinstance(v, torch.Tensor)}
    TERMS[name](inputs).mean().backward()
    assert all(torch.equal(getattr(inputs, n), v) for n, v in before.items())


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, found in CHANGED.items() for option in found])
def test_options_reach_the_result(name, option):
    inputs = inputs_of(random_case(13))
    changed = TERMS[name](inputs, **{option: CHANGED[name][option]}).mean().item()
    assert changed != pytest.approx(TERMS[name](inputs).mean().item(), rel=1e-6)


@pytest.mark.parametrize(("name", "options"), [("undial", {"gamma": 5.0}), ("masc", {"k": 1}), ("masc", {"beta": 2.0})])
def test_options_of_the_inputs_reach_the_result(name, options):
    case = random_case(14)
    a, b = TERMS[name](inputs_of(case)), TERMS[name](inputs_of(case, **options))
    assert a.total.item() != pytest.approx(b.total.item(), rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_input_is_named(name):
    inputs = inputs_of(random_case(15))
    for need in TERMS[name].needs:
        with pytest.raises(ValueError, match=f"^{name}: found no {need} in the inputs, accepted is"):
            TERMS[name](dataclasses.replace(inputs, **{need: None}))
    only = {n: getattr(inputs, n) for n in TERMS[name].needs}
    assert TERMS[name](TermInputs(inputs.rows, inputs.n_rows, **only)).terms == TERMS[name](inputs).terms


@pytest.mark.parametrize("name", NAMES)
def test_options_out_of_range_are_usage_errors(name):
    inputs = inputs_of(random_case(16))
    for option, spec in TERMS[name].options.items():
        for value in (math.nan, "text", True, math.inf):
            with pytest.raises(UsageError, match=f"^{option}: found .*accepted is") as error:
                TERMS[name](inputs, **{option: value})
            assert "\n" not in str(error.value)
        if not spec.check(-1.0):
            with pytest.raises(UsageError, match=f"^{option}: found -1"):
                TERMS[name](inputs, **{option: -1})
    with pytest.raises(UsageError, match=f"^nope: found an option that {name} does not have, accepted is"):
        TERMS[name](inputs, nope=1)


def test_rows_that_do_not_fit_are_refused():
    inputs = inputs_of(random_case(17))
    for name in ("npo", "simnpo", "dpo", "ap", "ga-sum", "masc"):
        with pytest.raises(ValueError, match="accepted is"):
            TERMS[name](dataclasses.replace(inputs, n_rows=1))
        with pytest.raises(ValueError, match="accepted is"):
            TERMS[name](dataclasses.replace(inputs, rows=inputs.rows[:-1]))


def test_no_retain_term_is_a_zero_of_nothing():
    found = RETAIN_TERMS["none"](TermInputs(torch.tensor([0]), 1))
    assert (found.total.item(), found.terms, found.mean().item()) == (0.0, 0, 0.0)


def test_every_term_says_where_it_comes_from():
    for registry in (FORGET_TERMS, RETAIN_TERMS):
        for name, term in registry.items():
            assert term.name == name
            assert term.reference.startswith("https://arxiv.org/abs/")
            assert term.formula
            assert "\n" not in term.formula
            for option in term.options.values():
                assert option.default is None or option.check(option.default)


def test_terms_that_could_not_be_called_are_refused():
    with pytest.raises(ValueError, match="found 'nope' in needs"):
        Term("mine", "x", lambda: None, ("nope",), "token")
    with pytest.raises(ValueError, match="per='batch'"):
        Term("mine", "x", lambda: None, ("logprob",), "batch")


def test_options_are_read_from_text():
    option = Option(1.0, "a number from 0", lambda x: x >= 0, optional=True)
    assert option.parse("x", "2.5") == 2.5
    assert option.parse("x", "none") is None
    whole = Option(1, "a whole number", lambda x: True, whole=True)
    assert whole.parse("x", "3") == 3
    assert isinstance(whole.parse("x", 3.0), int)
    with pytest.raises(UsageError, match=r"x: found '3\.5', accepted is a whole number"):
        whole.parse("x", "3.5")
    with pytest.raises(UsageError, match="x: found None"):
        whole.parse("x", None)
