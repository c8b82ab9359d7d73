"""What the words on the page mean, with the paper's equations (MASC, arXiv 2606.02920) as MathML."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True)
class Definition:
    """A word.

    Attributes:
        key: used in the page.
        name: as shown.
        text: one or two sentences.
        equation: MathML, or None.
    """

    key: str
    name: str
    text: str
    equation: Markup | None = None


def _math(body: str, spoken: str) -> Markup:
    return Markup('<math display="block" alttext="{}">').format(spoken) + Markup(body) + Markup("</math>")


def _i(name: str) -> str:
    return f"<mi>{name}</mi>"


def _o(sign: str) -> str:
    return f"<mo>{sign}</mo>"


def _sub(base: str, low: str) -> str:
    return f"<msub>{base}<mrow>{low}</mrow></msub>"


_Z_Y, _Z_V = _sub(_i("z"), _i("y")), _sub(_i("z"), _i("v"))
_M_T, _S_K = _sub(_i("m"), _i("t")), _sub(_i("S"), _i("k"))
_TAU = _sub(_i("τ"), _i("ρ"))
_IN_S = f"<munder>{_o('∑')}<mrow>{_i('v')}{_o('∈')}{_S_K}</mrow></munder>"
_OVER_T = f"<mfrac><mn>1</mn>{_i('T')}</mfrac><munder>{_o('∑')}{_i('t')}</munder>"

DEFINITIONS = (
    Definition(
        "margin",
        "margin",
        "How far a token of the answer is ahead of its k strongest competitors S_k in the model's logits z. "
        "Below the threshold the model would rather say something else.",
        _math(
            f"<mrow>{_M_T}{_o('=')}{_i('β')}{_Z_Y}{_o('−')}{_i('log')}{_IN_S}{_i('exp')}{_o('(')}{_i('β')}{_Z_V}"
            f"{_o(')')}</mrow>",
            "m_t = beta z_y - log sum over v in S_k of exp(beta z_v)",
        ),
    ),
    Definition(
        "tau",
        "threshold τ",
        "The margin at which a token would have probability ρ among itself and its competitors.",
        _math(
            f"<mrow>{_TAU}{_o('=')}{_i('log')}<mfrac>{_i('ρ')}<mrow><mn>1</mn>{_o('−')}{_i('ρ')}</mrow></mfrac></mrow>",
            "tau_rho = log(rho / (1 - rho))",
        ),
    ),
    Definition(
        "violation",
        "violation",
        "Share of an example's answer tokens that the model still knows: those whose margin is above τ. "
        "1: all of them; 0: none. Lower is better for what is to be forgotten.",
        _math(
            f"<mrow>{_i('V')}{_o('=')}{_OVER_T}<mn>1</mn>{_o('[')}{_M_T}{_o('&gt;')}{_TAU}{_o(']')}</mrow>",
            "V = (1/T) sum over t of 1[m_t > tau_rho]",
        ),
    ),
    Definition(
        "alpha",
        "tolerance α",
        "The mean violation at which a run stops. Measured on comparable texts the model never saw where there is a "
        "holdout: what cannot be told from such texts counts as forgotten.",
        _math(
            f"<mrow><mfrac><mn>1</mn>{_i('n')}</mfrac><munder>{_o('∑')}{_i('i')}</munder>{_sub(_i('V'), _i('i'))}"
            f"{_o('≤')}{_i('α')}</mrow>",
            "(1/n) sum over i of V_i <= alpha",
        ),
    ),
    Definition(
        "certificate",
        "certificate",
        "An upper bound on the probability that the saved model gives to the whole answer, word for word.",
        _math(
            f"<mrow>{_i('P')}{_o('(')}{_i('y')}{_o(')')}{_o('≤')}<munder>{_o('∏')}{_i('t')}</munder>{_i('σ')}{_o('(')}"
            f"{_M_T}{_o(')')}</mrow>",
            "P(y) <= product over t of sigma(m_t)",
        ),
    ),
    Definition(
        "verdict",
        "verdict",
        "forgotten: violation at most α. within chance: above α by no more than an example of its length strays by "
        "chance (95 %). left: above that.",
        _math(
            f"<mrow>{_i('V')}{_o('&gt;')}{_i('α')}{_o('+')}<mn>1.96</mn><msqrt><mfrac><mrow>{_i('α')}{_o('(')}"
            f"<mn>1</mn>{_o('−')}{_i('α')}{_o(')')}</mrow>{_i('T')}</mfrac></msqrt></mrow>",
            "left: V > alpha + 1.96 sqrt(alpha (1 - alpha) / T)",
        ),
    ),
    Definition(
        "probability",
        "probability",
        "Geometric mean of the probabilities of an answer's tokens.",
        _math(
            f"<mrow>{_i('exp')}{_o('(')}{_OVER_T}{_i('log')}{_sub(_i('p'), _i('t'))}{_o(')')}</mrow>",
            "exp((1/T) sum over t of log p_t)",
        ),
    ),
    Definition("exact", "exact match", "Share of an answer's tokens that are the model's first choice."),
    Definition(
        "rouge",
        "ROUGE-L",
        "Share of the true answer's words that are, in order, in the answer the model writes (recall); on a sample.",
    ),
    Definition(
        "probe",
        "probe and confirmation",
        "Training looks at a few examples; only where they pass, more examples at the same step decide about the stop. "
        "The whiskers are 95 % intervals of the mean.",
    ),
    Definition(
        "utility",
        "utility kept",
        "Mean probability of the answers to keep after the run, as a share of what it was before.",
    ),
    Definition(
        "recovered",
        "came back",
        "Of what the run took away, the share that a test brings back: 0 nothing, 1 all of it. "
        "Needs the original model's value.",
        _math(
            f"<mfrac><mrow>{_i('under')}{_o('−')}{_i('without')}</mrow><mrow>{_i('original')}{_o('−')}{_i('without')}"
            f"</mrow></mfrac>",
            "(under the test - without) / (original - without)",
        ),
    ),
    Definition("interval", "95 % interval", "Percentiles of the mean over resampled examples (bootstrap)."),
)
