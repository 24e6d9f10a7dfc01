r"""The notation of the course: the same letters in the derivations, in the docstrings and in the code.

| symbol | in the code | meaning |
|---|---|---|
| $x,\ D(x)$ | `prompts` | prompt, and how often it is asked |
| $y,\ \lvert y\rvert$ | `responses`, `tokens` | response: tokens that the policy sampled, and their number |
| $k$ | | place of a token in a response: $y_k$, and $y_{<k}$ for all before it |
| $r,\ R(x, y)$ | `rewards` | reward of a response |
| $z,\ \tau$ | `logits`, `temperature` | scores of all tokens before the softmax, and what they are divided by |
| $\pi_\theta(y \mid x)$ | `log_probs` | the policy with weights $\theta$; in the code its logarithm, token by token |
| $J(\theta)$ | `policy.objective()` | expected reward, what is to be raised |
| $s(y)$ | `scores` | score, $\nabla_\theta\log\pi_\theta(y \mid x)$ |
| $\pi_{\text{old}}$ | `old_log_probs` | the trainer's policy before its first update on the batch |
| $\pi_{\text{rollout}}$ | `rollout_log_probs` | the same weights as the engine that drew the tokens computed them |
| $\pi_{\text{ref}}$ | `ref_log_probs` | reference policy, which a penalty keeps the trained one near to |
| $\rho$ | | ratio $\pi_\theta / \pi_{\text{old}}$ of a token's probabilities |
| $G,\ i$ | `group_size`, `group_ids` | responses of a group, and the number of one in it |
| $\bar r,\ \sigma$ | | mean of a group's rewards, and their population standard deviation |
| $b$ | | baseline, what is subtracted from the reward |
| $A$ | `advantages` | advantage: how much better than expected |
| $V_k,\ \gamma,\ \lambda$ | `values`, `gamma`, `lam` | the critic's value, discount, GAE's mixing (lesson 04 only) |
| $\varepsilon_{\text{low}},\ \varepsilon_{\text{high}}$ | `clip_low`, `clip_high` | clip range of $\rho$ |
| $\beta$ | `beta` | weight of the KL penalty |
| $m,\ w$ | `mask`, `weights` | 1 where the policy wrote the token and 0 elsewhere; the token's weight in the loss |
| $j,\ c_j$ | `context` | number of a model call in a trajectory, and the context it saw |
| $N$ | | number of samples |
| $B,\ T,\ V$ | `(B, T)`, `(B, T, V)` | rows of a batch, tokens of a response, size of the vocabulary |

Two habits go with it. Losses are minimised, so their gradient estimates $-\nabla J$. Logarithms are natural, so
entropies and divergences are in nats. A few letters have a second meaning in one place, said there: $x$ in the KL
estimators and $s$ for GSPO's ratio (lesson 05), $c$ for a bound or a cost, $\tau$ for a trajectory (lessons 07, 08).
"""
