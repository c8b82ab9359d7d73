"""The terms by definition, on full logits with −100 labels, one token after the other; and random cases for them.

Written independently of `expunge.objectives`: probabilities instead of log-probabilities, loops instead of sums by row.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expunge.lm import Margin, labelled_positions, token_stats_from_logits
from expunge.objectives import TermInputs

VOCABULARY, HIDDEN, K = 11, 5, 3


@dataclass(frozen=True)
class Case:
    """A padded batch: (B, T, V) logits of policy and reference, (B, T) labels, the same for refusals, (B, T, d) states.

    Row 0 and 1 have answer and refusal, row 2 no labelled answer token, row 3 no labelled refusal token.
    """

    logits: Tensor
    reference: Tensor
    labels: Tensor
    refusal_logits: Tensor
    refusal_reference: Tensor
    refusal_labels: Tensor
    hidden: Tensor
    hidden_reference: Tensor
    direction: Tensor

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.logits, self.refusal_logits, self.hidden


def random_case(seed: int = 0, dtype: torch.dtype = torch.float64) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    def labels(tokens: list[list[int]], width: int) -> Tensor:
        found = torch.full((len(tokens), width), -100)
        for row, places in enumerate(tokens):
            found[row, places] = torch.randint(VOCABULARY, (len(places),), generator=generator)
        return found

    answers = labels([[2, 3, 4], [1, 5], [], [3, 4, 5]], 6)
    refusals = labels([[1, 2], [2, 3, 4], [3], []], 5)
    direction = draw(HIDDEN).abs()
    logits = draw(4, 6, VOCABULARY)
    row, position, targets = labelled_positions(answers)
    logits[row, position, targets] += 3.0  # half-memorised: margins on both sides of the hinge
    return Case(
        logits.requires_grad_(),
        draw(4, 6, VOCABULARY),
        answers,
        draw(4, 5, VOCABULARY).requires_grad_(),
        draw(4, 5, VOCABULARY),
        refusals,
        draw(4, 6, HIDDEN).requires_grad_(),
        draw(4, 6, HIDDEN),
        direction / direction.norm(),
    )


def rows_of(case: Case, rows: list[int]) -> Case:
    """Only these rows."""
    parts = {name: value[rows] for name, value in vars(case).items() if name != "direction"}
    return replace(case, **parts)


def inputs_of(case: Case, *, gamma: float = 2.0, k: int = K, beta: float = 1.0) -> TermInputs:
    """What the training loop would hand over, by the package's own statistics."""
    row, position, targets = labelled_positions(case.labels)
    z, z0 = case.logits[row, position], case.reference[row, position]
    stats = token_stats_from_logits(z, targets, logprob=True, entropy=True, uniform=True, kl=z0, margin=Margin(k, beta))
    r_row, r_position, r_targets = labelled_positions(case.refusal_labels)
    refusal = token_stats_from_logits(case.refusal_logits[r_row, r_position], r_targets, logprob=True)
    r_reference = token_stats_from_logits(case.refusal_reference[r_row, r_position], r_targets, logprob=True)
    return TermInputs(
        row,
        len(case.labels),
        logprob=stats.logprob,
        ref_logprob=token_stats_from_logits(z0, targets, logprob=True).logprob,
        entropy=stats.entropy,
        uniform=stats.uniform,
        kl=stats.kl,
        shifted=token_stats_from_logits(z, targets, kl=z0, target_shift=gamma).kl,
        margin=stats.margin,
        activation=case.hidden[row, position],
        ref_activation=case.hidden_reference[row, position],
        direction=case.direction,
        refusal_rows=r_row,
        refusal_logprob=refusal.logprob,
        ref_refusal_logprob=r_reference.logprob,
        vocabulary=case.logits.shape[-1],
    )


def tokens(logits: Tensor, labels: Tensor) -> list[list[tuple[Tensor, int, int]]]:
    """For each row: (logits, target, position of the prediction) of its labelled tokens."""
    found = []
    for b in range(len(labels)):
        row = [(logits[b, t - 1], int(labels[b, t]), t - 1) for t in range(1, labels.shape[1]) if labels[b, t] != -100]
        found.append(row)
    return found


def mean(values: list[Tensor]) -> Tensor:
    return sum(values) / len(values)


def probability(z: Tensor, y: int) -> Tensor:
    return torch.exp(z[y]) / torch.exp(z).sum()


def per_token(case: Case, value) -> Tensor:
    """Mean over all labelled tokens of value(policy logits, reference logits, target, row, position)."""
    found = [
        value(z, case.reference[b, t], y, b, t)
        for b, row in enumerate(tokens(case.logits, case.labels))
        for z, y, t in row
    ]
    return mean(found)


def per_row(case: Case, value, *, refusals: bool = False) -> Tensor:
    """Mean over rows that have what is compared of value(row)."""
    answers, others = tokens(case.logits, case.labels), tokens(case.refusal_logits, case.refusal_labels)
    return mean([value(b) for b in range(len(answers)) if answers[b] and (others[b] or not refusals)])


def sequence(logits: Tensor, labels: Tensor, b: int) -> Tensor:
    """log π(y_b)."""
    return sum(probability(z, y).log() for z, y, _ in tokens(logits, labels)[b])


def length(labels: Tensor, b: int) -> int:
    return int((labels[b, 1:] != -100).sum())


def minus_log_sigmoid(x: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(-x))


def plain_npo(case: Case, beta: float = 0.1, normalised: bool = False) -> Tensor:
    def one(b: int) -> Tensor:
        ratio = sequence(case.logits, case.labels, b) - sequence(case.reference, case.labels, b)
        return 2 / beta * minus_log_sigmoid(-beta * ratio / (length(case.labels, b) if normalised else 1))

    return per_row(case, one)


def plain_simnpo(case: Case, beta: float = 2.5, gamma: float = 0.0) -> Tensor:
    def one(b: int) -> Tensor:
        score = beta / length(case.labels, b) * sequence(case.logits, case.labels, b)
        return 2 / beta * minus_log_sigmoid(-score - gamma)

    return per_row(case, one)


def plain_dpo(case: Case, beta: float = 0.1) -> Tensor:
    def one(b: int) -> Tensor:
        win = sequence(case.refusal_logits, case.refusal_labels, b)
        win = win - sequence(case.refusal_reference, case.refusal_labels, b)
        lose = sequence(case.logits, case.labels, b) - sequence(case.reference, case.labels, b)
        return 2 / beta * minus_log_sigmoid(beta * (win - lose))

    return per_row(case, one, refusals=True)


def plain_ap(case: Case, beta: float = 0.1) -> Tensor:
    def one(b: int) -> Tensor:
        ratio = sequence(case.logits, case.labels, b) - sequence(case.refusal_logits, case.refusal_labels, b)
        return minus_log_sigmoid(beta * ratio) / beta

    return per_row(case, one, refusals=True)


def plain_idk(case: Case) -> Tensor:
    found = [-probability(z, y).log() for row in tokens(case.refusal_logits, case.refusal_labels) for z, y, _ in row]
    return mean(found)


def plain_wga(case: Case, beta: float = 1.0) -> Tensor:
    return per_token(case, lambda z, z0, y, b, t: probability(z, y).detach() ** beta * probability(z, y).log())


def plain_satimp(case: Case, beta1: float = 5.0, beta2: float = 1.0) -> Tensor:
    def one(z: Tensor, z0: Tensor, y: int, b: int, t: int) -> Tensor:
        p = probability(z, y)
        return p.detach() ** beta1 * (1 - p.detach()) ** beta2 * p.log()

    return per_token(case, one)


def plain_tnpo(case: Case, beta: float = 4.0) -> Tensor:
    def one(z: Tensor, z0: Tensor, y: int, b: int, t: int) -> Tensor:
        return 2 / beta * torch.log(1 + (probability(z, y) / probability(z0, y)) ** beta)

    return per_token(case, one)


def plain_ce_u(case: Case) -> Tensor:
    """The paper's: cross-entropy to the softmax of the detached logits with the target at −∞."""

    def one(z: Tensor, z0: Tensor, y: int, b: int, t: int) -> Tensor:
        others = [v for v in range(len(z)) if v != y]
        q = torch.softmax(z.detach()[others], 0)
        return -(q * torch.log_softmax(z, 0)[others]).sum()

    return per_token(case, one)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


def plain_undial(case: Case, gamma: float = 2.0) -> Tensor:
    def one(z: Tensor, z0: Tensor, y: int, b: int, t: int) -> Tensor:
        lowered = z0.clone()
        lowered[y] -= gamma
        return divergence(torch.softmax(lowered, 0), torch.softmax(z, 0))

    return per_token(case, one)


def plain_kl(case: Case) -> Tensor:
    return per_token(case, lambda z, z0, y, b, t: divergence(torch.softmax(z0, 0), torch.softmax(z, 0)))


def uniform_like(z: Tensor) -> Tensor:
    return torch.full_like(z.detach(), 1 / len(z))


def plain_me(case: Case) -> Tensor:
    return per_token(case, lambda z, z0, y, b, t: divergence(torch.softmax(z, 0), uniform_like(z)))


def plain_me_uniform(case: Case) -> Tensor:
    return per_token(case, lambda z, z0, y, b, t: divergence(uniform_like(z), torch.softmax(z, 0)))


def plain_rmu(case: Case, c: float = 6.5) -> Tensor:
    return per_token(case, lambda z, z0, y, b, t: ((case.hidden[b, t] - c * case.direction) ** 2).sum() / HIDDEN)


def plain_rmu_retain(case: Case) -> Tensor:
    def one(z: Tensor, z0: Tensor, y: int, b: int, t: int) -> Tensor:
        return ((case.hidden[b, t] - case.hidden_reference[b, t]) ** 2).sum() / HIDDEN

    return per_token(case, one)


def plain_masc(case: Case, rho: float = 0.7, eta: float = 0.25) -> Tensor:
    tau = math.log(rho / (1 - rho))

    def one(b: int) -> Tensor:
        found = []
        for z, y, _ in tokens(case.logits, case.labels)[b]:
            others = torch.cat([z[:y], z[y + 1 :]]).sort(descending=True).values[:K]
            found.append(((z[y] - torch.logsumexp(others, 0)) - tau + eta).clamp(min=0) / eta)
        return mean(found)

    return per_row(case, one)


# name of the term → the definition; every term but `none` has one.
PLAIN = {
    "ga": lambda case: per_token(case, lambda z, z0, y, b, t: probability(z, y).log()),
    "ga-sum": lambda case: per_row(case, lambda b: sequence(case.logits, case.labels, b)),
    "ce": lambda case: per_token(case, lambda z, z0, y, b, t: -probability(z, y).log()),
    "wga": plain_wga,
    "satimp": plain_satimp,
    "ce-u": plain_ce_u,
    "npo": plain_npo,
    "npo-norm": lambda case, beta=0.1: plain_npo(case, beta, normalised=True),
    "tnpo": plain_tnpo,
    "simnpo": plain_simnpo,
    "dpo": plain_dpo,
    "idk": plain_idk,
    "me": plain_me,
    "me-uniform": plain_me_uniform,
    "undial": plain_undial,
    "rmu": plain_rmu,
    "masc": plain_masc,
    "kl": plain_kl,
    "ap": plain_ap,
    "rmu-retain": plain_rmu_retain,
}
