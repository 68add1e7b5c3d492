"""`algorithm.loss`: surrogates in place of decoupled PPO's clipped term, one function per equation; M2PO's token mask,
which needs a whole minibatch.

A surrogate maps the policy's log-probabilities [N] to each token's term in J, [N].

    u = policy / anchor      the proximal ratio (`decoupled_ppo.py`)
    A                        the advantage
    sg                       stop gradient

`declare` adds two facts to a surrogate: the `anchors` that it allows, the default first (not declared: all), and a
`selection` of a minibatch's tokens, whose parameters become parameters of the loss. `LOSSES` has the names of a recipe.

Axes: N loss token (for M2PO's mask those of the whole minibatch), S sequence, K loss token in one of the two quadrants
in which PPO clips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field

from stretto.doors.door import Door, Part, Section, declare, fact
from stretto.trainer.objective.decoupled_ppo import Anchor, ClipHigh, ClipLow, Terms, clipped, ppo, proximal_ratio
from stretto.trainer.objective.tokens import LossTokens, bounded, ratio_of

if TYPE_CHECKING:
    from torch import Tensor

#: Maps log(policy / anchor) [N] and advantages [N] to the tokens that stay in the loss, [N] bool.
Selection: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
Threshold = Annotated[float, Field(gt=0, description="largest mean of (log ratio)^2 over the tokens in the quadrants")]


def m2po_mask(log_ratio: Tensor, advantages: Tensor, *, threshold: Threshold = 0.04) -> Tensor:
    """Keep as many tokens as possible such that the mean of `log_ratio`^2 over kept tokens in the quadrants is at most
    `threshold`; returns the kept tokens, [N] bool.

    M2PO, arXiv 2510.01161, algorithm 1. The quadrants are those in which PPO clips: the advantage and `log_ratio` are
    both positive or both negative. All other tokens stay, since their gradient pulls the policy back towards the
    anchor. Tokens with equal `log_ratio`^2 stay or leave together, so the choice does not depend on their order.
    """
    moment_N = log_ratio.square()
    inside = log_ratio * advantages > 0
    sorted_K = moment_N[inside].sort().values
    mean_K = sorted_K.cumsum(0) / inside[inside].cumsum(0)
    stays = int((mean_K <= threshold).sum())  # the mean of the k smallest never falls with k
    if stays == len(sorted_K):
        return inside.new_ones(inside.shape)
    return ~inside | (moment_N < sorted_K[stays])


Surrogate: TypeAlias = "Callable[[Tensor, LossTokens], Terms]"
Largest = Annotated[float, Field(gt=1, description="largest ratio of a token with a negative advantage")]
Warmth = Annotated[float, Field(gt=0, description="temperature where the advantage is positive")]
Tether = Annotated[float, Field(ge=0, description="weight of the squared distance from the anchor")]
Elsewhere = Annotated[float, Field(gt=0, description="temperature elsewhere")]


def dual_clip(
    policy_logprobs: Tensor,
    tokens: LossTokens,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    clip_negative: Largest = 3.0,
) -> Terms:
    """PPO's clip, and a floor where the advantage is negative.

    PPO's term t (`ppo`), and max(t, clip_negative A) where the advantage A < 0, so that a single token cannot dominate
    the step. Dual-clip PPO, arXiv 1912.09729 (clip_negative is its c).
    """
    terms = ppo(policy_logprobs, tokens, clip_low=clip_low, clip_high=clip_high)
    negative = tokens.advantages < 0
    floor = tokens.advantages * clip_negative
    floored = negative & (terms.objective < floor)
    return Terms(floor.where(floored, terms.objective), terms.ratio, terms.bounded | floored)


def gspo(policy_logprobs: Tensor, tokens: LossTokens, *, clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4) -> Terms:
    """PPO's clip with one ratio per completion.

    The ratio is sg(s) policy / sg(policy), s = exp(mean over the completion's loss tokens of log(policy / anchor)); sg:
    stop gradient.

    GSPO-token, arXiv 2507.18071, equations 13 and 14: the ratio has the value s, and the gradient of each token's term
    is s times its advantage times the gradient of its own log-probability. If all tokens of a completion have the same
    advantage, this is GSPO, equations 5 and 7. The paper's mean over completions is ``aggregation = "sequence_mean"``.
    """
    mean_S = tokens.sequences.means(policy_logprobs.detach() - tokens.anchor_logprobs)
    own = (policy_logprobs - policy_logprobs.detach()).exp()
    return clipped(tokens.sequences.spread(ratio_of(mean_S)) * own, tokens.advantages, clip_low, clip_high)


def cispo(policy_logprobs: Tensor, tokens: LossTokens, *, clip_low: ClipLow = 1.0, clip_high: ClipHigh = 4.0) -> Terms:
    """The policy gradient, weighed by the clipped ratio.

    sg(clip(u, 1 - clip_low, 1 + clip_high)) A log policy, with u = policy / anchor, the advantage A, and sg for stop
    gradient: the weight is clipped, no token loses its gradient. CISPO (MiniMax-M1), arXiv 2506.13585, equations 4 and
    5.
    """
    ratio = proximal_ratio(policy_logprobs.detach(), tokens)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Terms(weight * tokens.advantages * policy_logprobs, ratio, weight != ratio)


def sapo(policy_logprobs: Tensor, tokens: LossTokens, *, positive: Warmth = 1.0, negative: Elsewhere = 1.05) -> Terms:
    """A soft gate in place of the clip.

    sigmoid(tau (u - 1)) (4 / tau) A, u = policy / anchor, A: the advantage, tau = `positive` where A > 0 and `negative`
    elsewhere. 4 / tau makes the gradient at u = 1 that of the policy gradient.

    SAPO, arXiv 2511.20347.
    """
    ratio = proximal_ratio(policy_logprobs, tokens)
    tau = ratio.new_full(ratio.shape, negative).masked_fill(tokens.advantages > 0, positive)
    gate = (tau * (ratio - 1)).sigmoid() * (4 / tau)
    return Terms(gate * tokens.advantages, ratio.detach(), ratio.new_zeros(ratio.shape).bool())


@declare(anchors=("behavior",))
def topr(policy_logprobs: Tensor, tokens: LossTokens) -> Terms:
    """The policy gradient, tapered by the completion's ratio where the advantage is negative.

    sg(taper) A log policy, with the advantage A and sg for stop gradient. The taper is 1 where A >= 0, and elsewhere
    the ratio policy / anchor of the whole completion, at most 1.

    Tapered off-policy REINFORCE, arXiv 2503.14286, section 3: wrong completions that have become unlikely have little
    weight; right completions are learnt however unlikely they are.
    """
    log_ratio = policy_logprobs.detach() - tokens.anchor_logprobs
    log_sequence = tokens.sequences.spread(tokens.sequences.sums(log_ratio))
    negative = tokens.advantages < 0
    taper = log_sequence.clamp(max=0.0).exp().masked_fill(~negative, 1.0)
    return Terms(taper * tokens.advantages * policy_logprobs, ratio_of(log_ratio), negative & (log_sequence > 0))


@declare(anchors=("behavior",))
def dro(policy_logprobs: Tensor, tokens: LossTokens, *, beta: Tether = 0.05) -> Terms:
    """The policy gradient, held near the policy that sampled by the square of the log-ratio.

    A log policy - beta / 2 (log(policy / anchor))^2, with the advantage A.

    Direct reward optimisation, arXiv 2405.19107, section 3 (beta is its tau), with the advantage in place of r - V.
    """
    distance = bounded(policy_logprobs - tokens.anchor_logprobs)
    objective = tokens.advantages * policy_logprobs - 0.5 * beta * distance.square()
    return Terms(objective, distance.detach().exp(), distance.new_zeros(distance.shape).bool())


@declare(anchors=("behavior",), selection=m2po_mask)
def m2po(policy_logprobs: Tensor, tokens: LossTokens) -> Terms:
    """No clip; the farthest tokens are left out until the second moment is small enough.

    Ratio policy / anchor times advantage for the tokens that `m2po_mask` keeps, 0 for the others, which still count in
    the mean. M2PO, arXiv 2510.01161.

    Raises:
        ValueError: `tokens.kept` is None. `m2po_mask` must compute it over the whole minibatch before the losses.
    """
    if tokens.kept is None:
        raise ValueError("m2po needs the tokens that are kept over the whole minibatch")
    left_out = ~tokens.kept
    ratio = proximal_ratio(policy_logprobs, tokens)
    return Terms((ratio * tokens.advantages).masked_fill(left_out, 0.0), ratio.detach(), left_out)


def policy_gradient(policy_logprobs: Tensor, tokens: LossTokens) -> Terms:
    """REINFORCE.

    Advantage times log policy (Williams, 1992); the ratio is only reported.
    """
    ratio = proximal_ratio(policy_logprobs.detach(), tokens)
    return Terms(tokens.advantages * policy_logprobs, ratio, ratio.new_zeros(ratio.shape).bool())


_ANCHOR = (
    "the policy around which the trust region lies; recomputed: before this step (decoupled); "
    "interpolated: the same, estimated from versions; behavior: the one that sampled (not decoupled)"
)


class LossSection(Section):
    """A surrogate with its anchor and parameters: the value of `algorithm.loss`. Each surrogate has a subclass."""

    kind: str
    anchor: Anchor

    @classmethod
    def fields_of(cls, part: Part) -> dict[str, Any]:
        """Fields of the section of the surrogate `part`, (type, default) by name: the allowed anchors, its parameters,
        and the parameters of its selection.

        Raises:
            ValueError: the surrogate declares unknown anchors, or a parameter that cannot be written in a recipe.
        """
        anchors, allowed = fact(part, "anchors", get_args(Anchor)), get_args(Anchor)
        if not (isinstance(anchors, tuple) and anchors and set(anchors) <= set(allowed)):
            raise ValueError(f"declares anchors = {anchors!r}; a tuple of some of {', '.join(allowed)} is needed")
        selection = fact(part, "selection", None)
        chosen = cls.numbers_of(selection) if callable(selection) else {}
        anchor = Annotated[Literal[anchors], Field(description=_ANCHOR)]  # type: ignore[valid-type]  # made here
        return {"anchor": (anchor, anchors[0]), **cls.numbers_of(part), **chosen}

    @property
    def surrogate(self) -> Surrogate:
        """The surrogate with its parameters bound; a user's own raises RecipeError where its code raises."""
        return self.bound(self.part)

    @property
    def selection(self) -> Selection | None:
        """The token selection with its parameters bound; None if the loss has none."""
        selection = fact(self.part, "selection", None)
        return None if selection is None else self.bound(selection)


_HERE, _PPO = __name__, "stretto.trainer.objective.decoupled_ppo"
#: The losses of a recipe. One more is a function of this file, and its row here.
LOSSES = Door(
    key="algorithm.loss",
    what="loss",
    arguments=("policy_logprobs", "tokens"),
    built_in={
        "decoupled_ppo": f"{_PPO}:decoupled_ppo",
        "ppo": f"{_PPO}:ppo",
        "dual_clip": f"{_HERE}:dual_clip",
        "gspo": f"{_HERE}:gspo",
        "cispo": f"{_HERE}:cispo",
        "sapo": f"{_HERE}:sapo",
        "m2po": f"{_HERE}:m2po",
        "topr": f"{_HERE}:topr",
        "dro": f"{_HERE}:dro",
        "policy_gradient": f"{_HERE}:policy_gradient",
    },
    section=LossSection,
    returns=Terms,
)
