r"""The notation of the course: the same letters in the derivations, in the docstrings and in the code.

| symbol | in the code | meaning |
|---|---|---|
| $x$ | `prompts` | prompt |
| $y$ | `responses`, `tokens` | response, a sequence of tokens that the policy sampled |
| $k$ | | place of a token in a response: $y_k$, and $y_{<k}$ for all before it |
| $r,\ R(x, y)$ | `rewards` | reward of a response |
| $\pi_\theta(y \mid x)$ | `log_probs` | the policy: probability of $y$ given $x$ under the weights $\theta$ |
| $J(\theta)$ | `policy.objective()` | expected reward, what is to be raised |
| $\pi_{\text{old}}$ | `old_log_probs` | the policy that sampled the batch |
| $\pi_{\text{ref}}$ | `ref_log_probs` | reference policy, which a penalty keeps the trained one near to |
| $\pi_{\text{rollout}}$ | `rollout_log_probs` | the probabilities of the engine that sampled, which differ a little from the trainer's |
| $\rho$ | | ratio $\pi_\theta / \pi_{\text{old}}$ of a token's probabilities |
| $G,\ i$ | `group_ids` | group size, and the number of a response in its group |
| $A$ | `advantages` | advantage: how much better than expected |
| $\varepsilon_{\text{low}},\ \varepsilon_{\text{high}}$ | `clip_low`, `clip_high` | clip range of $\rho$ |
| $\beta$ | `beta` | weight of the KL penalty |
| $j,\ c_j$ | `Call.context` | number of a model call in a trajectory, and the context it saw |
| $B,\ T,\ V$ | `(B, T)`, `(B, T, V)` | rows of a batch, tokens of a response, size of the vocabulary |

Three habits go with it. Losses are minimised, so their gradient points away from $\nabla J$. Masks are 1 where the
policy wrote the token and 0 elsewhere. Logarithms are natural, so entropies and divergences are in nats.
"""
