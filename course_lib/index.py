r"""The index of the course: from an equation to its function, test, exercise, and its names in TRL and verl.

Everything is text, so nothing is imported for it; tests/test_index.py checks that every name exists.
`python tools/index.py` writes the table into README.md.
"""

from dataclasses import dataclass

NOTE = (
    "A test's name is its sentence with underscores after `test_`. TRL: options of `GRPOConfig`. verl: keys of its PPO "
    "trainer's configuration; `actor.` and `rollout.` stand below `actor_rollout_ref.`."
)


@dataclass(frozen=True)
class Entry:
    r"""One idea of the course.

    Args:
        lesson: Number of the lesson that derives it.
        heading: The section's heading in that lesson, without "## "; empty while the lesson is not written.
        name: What it is called.
        formula: LaTeX, a line each where one would be too wide for a table, and without "|", which would end the cell.
        functions: Dotted names below `course_lib`.
        tests: "test_losses.py::test_kl_by_enumeration", below tests/.
        exercises: Their ids.
        trl: Options of TRL's GRPOConfig, each in backticks as `name` or `name=value`.
        verl: The same for verl, without `actor_rollout_ref.`.
    """

    lesson: int
    heading: str
    name: str
    formula: str
    functions: tuple[str, ...]
    tests: tuple[str, ...]
    exercises: tuple[str, ...] = ()
    trl: str = ""
    verl: str = ""


class MarkdownTable(str):
    """Markdown that a notebook shows as a table, and `print` as text."""

    __slots__ = ()

    def _repr_markdown_(self) -> str:
        return str(self)


def index_table(lesson: int | None = None) -> MarkdownTable:
    """The index as a table for a notebook: the last expression of a cell shows it.

    Args:
        lesson: Only what this lesson derives; None for all.

    Example:
        >>> [line.partition(" · ")[2].partition("<br>")[0] for line in index_table(3).splitlines()[2:4]]
        ['expected grad-log-prob (EGLP)', 'leave-one-out baseline']
    """
    chosen = [entry for entry in ENTRIES if lesson in (None, entry.lesson)]
    return MarkdownTable(_table(chosen, lessons="", root="../", math="${}$") + "\n\n" + NOTE)


def readme_table() -> str:
    """The whole index, with links from the repository's root and formulas as code-hosting pages read them."""
    return _table(ENTRIES, lessons="notebooks/", root="", math="$`{}`$") + "\n\n" + NOTE


def _table(entries, *, lessons: str, root: str, math: str) -> str:
    """Markdown rows; `lessons` and `root` are the ways to notebooks/ and to the repository's root."""
    wide = "&emsp;" * 10  # formulas shrink where a browser leaves their column too little room
    lines = [
        f"| equation{wide} | function, and the tests that hold it | exercise | in TRL and verl |",
        "|---|---|---|---|",
    ]
    for entry in entries:
        where = f"{entry.lesson:02d}"
        if entry.heading:
            where = f"[{where}]({lessons}{NOTEBOOKS[entry.lesson]}#{entry.heading.replace(' ', '-')})"
        functions = [f"[`{name}`]({root}course_lib/{_source(name)})" for name in entry.functions]
        tests = [f"[{_sentence(test)}]({root}tests/{test.partition('::')[0]})" for test in entry.tests]
        elsewhere = [f"{library}: {names}" for library, names in (("TRL", entry.trl), ("verl", entry.verl)) if names]
        cells = (
            "<br>".join([f"{where} · {entry.name}", *map(math.format, entry.formula.splitlines())]),
            "<br>".join(functions + tests),
            "<br>".join(entry.exercises),
            "<br>".join(elsewhere),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _sentence(test: str) -> str:
    """What a test says: "test_losses.py::test_owners_are_one_vote_each" → "owners are one vote each"."""
    return test.partition("::test_")[2].replace("_", " ")


def _source(name: str) -> str:
    """Where a dotted name is written, "losses.token_weights" → "losses.py"."""
    module = name.partition(".")[0]
    return f"{module}/" if module in ("toy", "exercises") else f"{module}.py"


NOTEBOOKS = {
    1: "01_policies_and_objectives.ipynb",
    2: "02_reinforce.ipynb",
    3: "03_baselines.ipynb",
    4: "04_ppo_clipping.ipynb",
    5: "05_grpo.ipynb",
    6: "06_grpo_in_practice.ipynb",
    7: "07_agent_trajectories.ipynb",
    8: "08_stepwise_grpo.ipynb",
    10: "10_the_capstone.ipynb",
}

ENTRIES = (
    Entry(
        lesson=1,
        heading="2 The log-probability of a response is a sum",
        name="log-probability of a response",
        formula=r"\sum_k\log\pi_\theta(y_k\mid x,y_{<k})",
        functions=("logprobs.token_log_probs", "logprobs.response_log_probs"),
        tests=(
            "test_toy.py::test_log_probability_is_a_sum_of_context_dependent_logs",
            "test_logprobs.py::test_value_and_gradient_equal_log_softmax",
        ),
        exercises=("01.1",),
    ),
    Entry(
        lesson=1,
        heading="3 What temperature does to log-probabilities",
        name="temperature",
        formula=r"\log\pi_\tau(v)=z_v/\tau-\log\sum_u e^{z_u/\tau}",
        functions=("logprobs.token_log_probs",),
        tests=("test_logprobs.py::test_the_temperature_is_inside",),
        exercises=("01.2",),
        trl="`temperature`",
        verl="`rollout.temperature`",
    ),
    Entry(
        lesson=1,
        heading="2 The log-probability of a response is a sum",
        name="which tokens are the response",
        formula=r"m_k=1\ \text{up to the first end}",
        functions=("logprobs.response_mask",),
        tests=("test_logprobs.py::test_the_first_end_is_trained_where_padding_has_the_same_id",),
        trl="`mask_truncated_completions` drops responses that never end",
    ),
    Entry(
        lesson=1,
        heading="4 The objective",
        name="objective and its gradient",
        formula=r"J=\sum_{x,y}D(x)\,\pi_\theta(y\mid x)\,R(x,y)",
        functions=("toy.EnumerablePolicy.objective", "toy.EnumerablePolicy.gradient"),
        tests=("test_toy.py::test_gradient_is_the_score_form_and_finite_differences",),
        exercises=("01.3", "01.5"),
        trl="`reward_weights` of the reward functions",
        verl="`reward.custom_reward_function.path`",
    ),
    Entry(
        lesson=1,
        heading="6 Estimating J from samples",
        name="Monte Carlo error of J",
        formula=r"\sqrt{J(1-J)/N}",
        functions=("toy.EnumerablePolicy.sample",),
        tests=("test_toy.py::test_sampling_frequencies_and_groups",),
        exercises=("01.4",),
    ),
    Entry(
        lesson=2,
        heading="2 What a score looks like",
        name="score of a softmax",
        formula=r"\partial\log\pi(a)/\partial z_v=\mathbb{1}[v=a]-\pi(v)",
        functions=("toy.EnumerablePolicy.token_scores", "toy.EnumerablePolicy.scores"),
        tests=("test_toy.py::test_token_scores_are_autograd_of_log_probs",),
        exercises=("02.1", "02.5"),
    ),
    Entry(
        lesson=2,
        heading="3 The estimator",
        name="REINFORCE",
        formula=r"\nabla J=\mathbb{E}[R\,\nabla\log\pi_\theta(y\mid x)]",
        functions=("toy.Samples.policy_gradient",),
        tests=("test_toy.py::test_reinforce_and_leave_one_out_are_unbiased",),
        exercises=("02.2",),
    ),
    Entry(
        lesson=2,
        heading="4 How wrong is one estimate?",
        name="variance of an estimator",
        formula=r"\mathbb{E}\lVert\hat g-\mathbb{E}\,\hat g\rVert^2",
        functions=("toy.moments",),
        tests=(
            "test_toy.py::test_moments_equal_a_loop_over_every_ordered_group",
            "test_toy.py::test_the_mean_of_independent_samples_divides_the_covariance",
        ),
    ),
    Entry(
        lesson=2,
        heading="5 A loss for autograd",
        name="surrogate loss",
        formula=r"-\tfrac{1}{N}\sum_i R_i\sum_k\log\pi_\theta(y_{ik}\mid\cdot)",
        functions=("losses.reinforce_loss", "toy.from_loss"),
        tests=("test_toy.py::test_the_surrogate_loss_has_the_policy_gradient",),
        exercises=("02.3",),
        verl="`actor.loss_agg_mode=seq-mean-token-sum`",
    ),
    Entry(
        lesson=2,
        heading="6 Does every token deserve the whole reward?",
        name="reward-to-go",
        formula=r"\sum_k\nabla\log\pi_\theta(y_k\mid\cdot)\sum_{l\ge k}r_l",
        functions=("toy.Samples.policy_gradient",),
        tests=("test_toy.py::test_token_advantages_and_row_advantages_agree",),
        exercises=("02.4",),
        verl="`algorithm.adv_estimator=reinforce_plus_plus`, `algorithm.gamma`",
    ),
    Entry(
        lesson=3,
        heading="2 The lemma",
        name="expected grad-log-prob (EGLP)",
        formula=r"\mathbb{E}[\nabla\log\pi_\theta(y\mid x)]=0",
        functions=("toy.EnumerablePolicy.scores",),
        tests=("test_toy.py::test_scores_have_mean_zero",),
        exercises=("03.3",),
    ),
    Entry(
        lesson=3,
        heading="4 The group as its own baseline",
        name="leave-one-out baseline",
        formula=r"A_i=r_i-\tfrac{1}{G-1}\sum_{j\ne i}r_j",
        functions=("advantages.leave_one_out_advantages",),
        tests=(
            "test_advantages.py::test_group_mean_is_a_shrunken_leave_one_out",
            "test_advantages.py::test_expected_gradient_of_both_baselines",
        ),
        exercises=("03.4", "03.5"),
        trl="`RLOOTrainer`",
        verl="`algorithm.adv_estimator=rloo`",
    ),
    Entry(
        lesson=3,
        heading="3 The variance is a parabola",
        name="baseline of least variance",
        formula=r"b^*=\mathbb{E}[R\,\lVert s\rVert^2]/\mathbb{E}[\lVert s\rVert^2],\ s=\nabla\log\pi",
        functions=("toy.optimal_baseline", "toy.moments"),
        tests=("test_toy.py::test_optimal_baseline_is_the_minimum_of_a_scan",),
        exercises=("03.1", "03.2"),
        verl="`algorithm.adv_estimator=optimal_token_baseline`, token by token",
    ),
    Entry(
        lesson=4,
        heading="4 The first step is REINFORCE",
        name="importance ratio",
        formula=r"\rho_k=\pi_\theta(y_k\mid\cdot)/\pi_{\text{old}}(y_k\mid\cdot)",
        functions=("losses.clipped_surrogate",),
        tests=(
            "test_losses.py::test_the_first_step_is_reinforce",
            "test_losses.py::test_the_ratio_leaves_one_in_the_second_epoch",
        ),
        exercises=("04.1",),
        trl="`num_iterations`, `steps_per_generation`",
        verl="`actor.ppo_epochs`, `actor.ppo_mini_batch_size`",
    ),
    Entry(
        lesson=4,
        heading="5 The clip",
        name="clipped surrogate",
        formula=r"\min(\rho A,\ \mathrm{clip}(\rho)A)",
        functions=("losses.clipped_surrogate", "plots.clip_plane"),
        tests=("test_losses.py::test_six_regions_of_the_clip",),
        exercises=("04.2", "04.3", "04.4"),
        trl="`epsilon`, `epsilon_high`",
        verl="`actor.clip_ratio_low`, `actor.clip_ratio_high`",
    ),
    Entry(
        lesson=4,
        heading="7 What the clip does not do",
        name="dual clip",
        formula=r"\max(\min(\cdots),\ cA)\ \text{where}\ A<0",
        functions=("losses.clipped_surrogate",),
        tests=("test_losses.py::test_dual_clip_bounds_the_loss_of_negative_advantages",),
        trl="`delta`",
        verl="`actor.clip_ratio_c`",
    ),
    Entry(
        lesson=4,
        heading="9 GAE",
        name="generalised advantage estimation",
        formula="A_k=\\delta_k+\\gamma\\lambda A_{k+1}\n\\delta_k=r_k+\\gamma V_{k+1}-V_k",
        functions=("advantages.generalized_advantages",),
        tests=(
            "test_advantages.py::test_gae_extremes",
            "test_advantages.py::test_gae_skips_what_the_policy_did_not_produce",
        ),
        exercises=("04.5",),
        verl="`algorithm.adv_estimator=gae`, `algorithm.gamma`, `algorithm.lam`, `critic.cliprange_value`",
    ),
    Entry(
        lesson=5,
        heading="1 From critic to group",
        name="group-relative advantage",
        formula=r"A_i=(r_i-\bar r)\,/\,\sigma",
        functions=("advantages.group_relative_advantages",),
        tests=(
            "test_advantages.py::test_each_group_sums_to_zero_with_unit_std",
            "test_advantages.py::test_groups_of_different_sizes_anywhere_in_the_batch",
        ),
        exercises=("05.1",),
        trl="`num_generations` is G",
        verl="`algorithm.adv_estimator=grpo`, `rollout.n` is G",
    ),
    Entry(
        lesson=5,
        heading="2 Right or wrong: the closed forms",
        name="binary rewards",
        formula="A_{\\text{success}}=\\sqrt{(1-\\hat p)/\\hat p}\nA_{\\text{failure}}=-\\sqrt{\\hat p/(1-\\hat p)}",
        functions=("advantages.group_relative_advantages",),
        tests=(
            "test_advantages.py::test_binary_rewards_follow_the_closed_forms",
            "test_advantages.py::test_sample_std_and_eps_as_in_trl",
        ),
        exercises=("05.2",),
        trl="sample std + 1e-4",
        verl="sample std + 1e-6",
    ),
    Entry(
        lesson=5,
        heading="3 What dividing by the standard deviation does",
        name="dividing by the std, or not",
        formula="\\sum_x D(x)\\,w_G(p_x)\\,\\nabla J_x\nw_\\infty=1/\\sqrt{p(1-p)}",
        functions=("advantages.group_relative_advantages",),
        tests=(
            "test_toy_agents.py::test_std_division_rescales_the_gradient_of_one_prompt",
            "test_toy_agents.py::test_std_division_bends_the_gradient_of_two_prompts",
        ),
        trl='`scale_rewards="group"`, `"batch"` or `"none"` (Dr. GRPO)',
        verl="`algorithm.norm_adv_by_std_in_grpo`",
    ),
    Entry(
        lesson=5,
        heading="4 How large a group?",
        name="groups without signal",
        formula=r"r_1=\dots=r_G\ \Rightarrow\ A=0",
        functions=("advantages.informative_groups", "advantages.group_relative_advantages"),
        tests=(
            "test_advantages.py::test_equal_rewards_give_exactly_zero",
            "test_advantages.py::test_a_group_of_one_says_nothing",
            "test_advantages.py::test_rewards_that_differ_by_rounding_count_as_equal",
        ),
        exercises=("05.1",),
        trl="metric `frac_reward_zero_std`; refuses G = 1",
        verl="`algorithm.filter_groups.enable`; G = 1 keeps the raw reward",
    ),
    Entry(
        lesson=5,
        heading="5 One weight per token",
        name="sequence-sum",
        formula=r"w_{ik}=1/B",
        functions=("losses.token_weights", "losses.aggregate"),
        tests=("test_losses.py::test_weights_follow_the_table",),
        exercises=("05.3",),
        verl="`actor.loss_agg_mode=seq-mean-token-sum`",
    ),
    Entry(
        lesson=5,
        heading="6 Length bias",
        name="sequence-mean (GRPO as published)",
        formula=r"w_{ik}=1/(B\,\lvert y_i\rvert)",
        functions=("losses.token_weights",),
        tests=(
            "test_losses.py::test_weights_follow_the_table",
            "test_toy_agents.py::test_length_normalised_weights_follow_another_gradient",
        ),
        exercises=("05.3",),
        trl='`loss_type="grpo"`',
        verl="`actor.loss_agg_mode=seq-mean-token-mean`",
    ),
    Entry(
        lesson=5,
        heading="6 Length bias",
        name="token-mean (DAPO)",
        formula=r"w_{ik}=1/\sum_j\lvert y_j\rvert",
        functions=("losses.token_weights",),
        tests=(
            "test_losses.py::test_micro_batches_add_up_to_the_batch",
            "test_losses.py::test_token_mean_over_micro_batches_is_not_the_mean_of_their_means",
        ),
        exercises=("05.3", "05.4"),
        trl='`loss_type="dapo"`; `"bnpo"` counts the tokens of the micro-batch only',
        verl="`actor.loss_agg_mode=token-mean`",
    ),
    Entry(
        lesson=5,
        heading="6 Length bias",
        name="fixed-length (Dr. GRPO)",
        formula=r"w_{ik}=1/(B\,L_{\max})",
        functions=("losses.token_weights",),
        tests=("test_losses.py::test_weights_follow_the_table",),
        exercises=("05.3",),
        trl='`loss_type="dr_grpo"`, `max_completion_length`',
        verl="`actor.loss_agg_mode=seq-mean-token-sum-norm`, `actor.loss_scale_factor`",
    ),
    Entry(
        lesson=5,
        heading="7 The KL penalty",
        name="KL estimates",
        formula="k_1=-x,\\ k_2=x^2/2\nk_3=e^x-1-x\nx=\\log\\pi_{\\text{ref}}-\\log\\pi_\\theta",
        functions=("losses.kl_estimate", "losses.grpo_loss"),
        tests=(
            "test_losses.py::test_kl_values",
            "test_losses.py::test_kl_by_enumeration",
            "test_losses.py::test_k3_keeps_its_gradient_in_every_precision",
        ),
        exercises=("05.5", "05.6"),
        trl="`beta`, always k3; `use_bias_correction_kl` multiplies it by ρ",
        verl=(
            "`actor.use_kl_loss`, `actor.kl_loss_coef`, `actor.kl_loss_type=kl` (k1), `mse` (k2), `low_var_kl` (k3); "
            "in the reward: `algorithm.use_kl_in_reward`"
        ),
    ),
    Entry(
        lesson=5,
        heading="8 GSPO: one ratio per response",
        name="GSPO's ratio",
        formula=r"s_i=(\pi_\theta/\pi_{\text{old}})^{1/\lvert y_i\rvert}",
        functions=("losses.clipped_surrogate",),
        tests=("test_losses.py::test_sequence_ratio_is_the_exponential_of_the_mean_log_ratio",),
        exercises=("05.7",),
        trl='`importance_sampling_level="sequence"`',
        verl="`actor.policy_loss.loss_mode=gspo`",
    ),
    Entry(
        lesson=5,
        heading="9 The whole loss, live",
        name="the whole loss",
        formula=r"\sum_{i,k}w_{ik}(\ell_{ik}+\beta\,\widehat{\mathrm{KL}}_{ik})",
        functions=("losses.grpo_loss",),
        tests=("test_losses.py::test_gradients_against_finite_differences", "test_losses.py::test_metrics_by_hand"),
    ),
    Entry(
        lesson=6,
        heading="1 Dead groups",
        name="dynamic sampling",
        formula="P(\\text{no signal})=p^G+(1-p)^G\n\\mathbb{E}[g\\mid\\text{useful}]=\\mathbb{E}[g]/P(\\text{useful})",
        functions=("advantages.informative_groups", "training.GRPOTrainer"),
        tests=(
            "test_training.py::test_dead_groups_are_drawn_again_then_dropped_and_counted",
            "test_gallery.py::test_dead_groups",
        ),
        exercises=("06.1", "06.2"),
        verl="`algorithm.filter_groups.enable`, `algorithm.filter_groups.max_num_gen_batches`",
    ),
    Entry(
        lesson=6,
        heading="2 Clip-higher, and where it matters",
        name="clip-higher",
        formula=r"[1-0.2,\ 1+0.28]",
        functions=("losses.clipped_surrogate",),
        tests=("test_losses.py::test_six_regions_of_the_clip",),
        trl="`epsilon_high`",
        verl="`actor.clip_ratio_high`",
    ),
    Entry(
        lesson=6,
        heading="4 Reading a run",
        name="entropy of a token",
        formula=r"-\sum_v\pi_\theta(v\mid\cdot)\log\pi_\theta(v\mid\cdot)",
        functions=("logprobs.token_entropy",),
        tests=("test_logprobs.py::test_entropy_is_the_expected_surprise",),
        trl="`entropy_coef`",
        verl="`actor.entropy_coeff`",
    ),
    Entry(
        lesson=6,
        heading="3 The sampler is not quite the policy",
        name="truncated importance weight",
        formula=r"\min(\pi_{\text{old}}/\pi_{\text{rollout}},\ C)",
        functions=("losses.truncated_importance_weights", "losses.grpo_loss"),
        tests=(
            "test_losses.py::test_importance_weights_by_token_and_sequence",
            "test_losses.py::test_the_importance_weight_multiplies_the_policy_term_only",
        ),
        exercises=("06.3",),
        trl=(
            "`vllm_importance_sampling_correction`, `vllm_importance_sampling_mode=token_truncate`, "
            "`vllm_importance_sampling_clip_max` (`vllm_importance_sampling_cap` before)"
        ),
        verl="`algorithm.rollout_correction.rollout_is`, `algorithm.rollout_correction.rollout_is_threshold`",
    ),
    Entry(
        lesson=6,
        heading="3 The sampler is not quite the policy",
        name="effective sample size",
        formula=r"(\sum_iw_i)^2/\sum_iw_i^2",
        functions=("losses.effective_sample_size",),
        tests=("test_losses.py::test_effective_sample_size_is_what_the_variance_says",),
    ),
    Entry(
        lesson=6,
        heading="3 The sampler is not quite the policy",
        name="does an engine draw from what it reports?",
        formula=r"\chi^2=\sum(\text{seen}-\text{expected})^2/\text{expected}",
        functions=("engines.goodness_of_fit", "engines.local_engine", "engines.connect"),
        tests=(
            "test_engines.py::test_sampled_frequencies_fit_the_reported_probabilities",
            "test_engines.py::test_top_k_left_on_loses_the_mass_of_all_other_tokens",
        ),
    ),
    Entry(
        lesson=6,
        heading="6 The gallery",
        name="faults and the metrics that tell them",
        formula=r"\lvert\log\pi_{\text{old}}-\log\pi_{\text{rollout}}\rvert,\ \dots",
        functions=("gallery.GALLERY", "training.GRPOTrainer"),
        tests=(
            "test_gallery.py::test_what_is_wrong_from_the_first_step_on",
            "test_gallery.py::test_a_stale_sampler",
            "test_gallery.py::test_a_lenient_parser",
            "test_gallery.py::test_entropy_collapse",
        ),
        exercises=("06.4", "06.5", "06.6"),
    ),
    Entry(
        lesson=7,
        heading="2 The environment has no gradient",
        name="a trajectory's score splits by call",
        formula="\\nabla\\log p_\\theta(\\tau)=\n\\sum_j\\nabla\\log\\pi_\\theta(y_j\\mid c_j)",
        functions=("trajectories.Trajectory", "toy.ToyAgent"),
        tests=(
            "test_toy_agents.py::test_the_score_splits_by_call_and_the_environment_has_none",
            "test_toy_agents.py::test_gradient_is_the_score_form_and_finite_differences",
        ),
    ),
    Entry(
        lesson=7,
        heading="3 One transcript, one mask",
        name="masked transcript",
        formula=r"\sum_t m_t\log\pi_\theta(h_t\mid h_{<t})",
        functions=("trajectories.segments", "trajectories.stepwise_batch"),
        tests=(
            "test_trajectories.py::test_an_append_only_agent_is_its_transcript",
            "test_toy_agents.py::test_the_final_transcript_is_exact_for_an_append_only_agent",
        ),
        exercises=("07.1", "07.2"),
        trl="`max_tool_calling_iterations`",
        verl="`rollout.multi_turn.enable`, `rollout.multi_turn.max_assistant_turns`",
    ),
    Entry(
        lesson=7,
        heading="4 Training on the tool's words",
        name="tool tokens are no actions",
        formula=r"\mathbb{E}_{o\sim P}[\nabla_z\log\pi(o)]=P-\pi",
        functions=("trajectories.Segment",),
        tests=(
            "test_toy_agents.py::test_training_on_the_environments_tokens_is_biased",
            "test_toy_agents.py::test_tool_tokens_in_a_shared_row_hold_the_search_at_one_over_their_number",
        ),
    ),
    Entry(
        lesson=7,
        heading="5 Never decode and encode again",
        name="prefix test",
        formula=r"c_{j+1}=c_j+y_j+o_j",
        functions=("trajectories.Call", "trajectories.segments"),
        tests=(
            "test_trajectories.py::test_one_different_token_is_no_prefix",
            "test_trajectories.py::test_sampled_ids_are_trained_even_if_decoding_would_merge_them",
        ),
        exercises=("07.3", "07.4"),
        verl="`rollout.multi_turn.tokenization_sanity_check_mode`",
    ),
    Entry(
        lesson=7,
        heading="6 A row for every call, or one for all",
        name="merging prefixes",
        formula="\\tfrac{n(n-1)}{2}\\lvert y_j o_j\\rvert\n\\to\\ (n-1)\\lvert y_j o_j\\rvert",
        functions=("trajectories.segments", "tree.tree_size"),
        tests=(
            "test_trajectories.py::test_merging_prefixes_changes_no_gradient",
            "test_trajectories.py::test_merging_prefixes_changes_no_gradient_of_a_transformer",
            "test_trajectories.py::test_order_padding_and_micro_batches_change_no_gradient",
        ),
    ),
    Entry(
        lesson=8,
        heading="3 Segments",
        name="stepwise GRPO",
        formula=r"\sum_i A_i\sum_j\nabla\log\pi_\theta(y_{ij}\mid c_{ij})",
        functions=("trajectories.segments", "trajectories.stepwise_batch"),
        tests=(
            "test_toy_agents.py::test_stepwise_with_leave_one_out_over_trajectories_is_exact",
            "test_toy_agents.py::test_stepwise_segments_are_exact_for_any_way_of_editing",
        ),
        exercises=("08.1",),
    ),
    Entry(
        lesson=8,
        heading="2 Training on the final transcript",
        name="the final transcript is biased",
        formula=r"\mathbb{E}[(R-J)\,\tilde s]\ne\nabla J",
        functions=("toy.Samples.final_transcripts", "toy.research_agent"),
        tests=(
            "test_toy_agents.py::test_the_final_transcript_of_an_editing_agent_never_trains_the_note",
            "test_toy_agents.py::test_the_final_transcript_of_an_editing_agent_shows_in_the_first_ratio",
        ),
    ),
    Entry(
        lesson=8,
        heading="4 One baseline for whole trajectories",
        name="baseline over trajectories, not steps",
        formula=r"r_i-\tfrac{1}{G}\sum_k r_k,\ \text{not}\ r_i-\frac{\sum_k n_k r_k}{\sum_k n_k}",
        functions=("trajectories.trajectory_advantages",),
        tests=(
            "test_trajectories.py::test_the_baseline_is_over_trajectories_not_steps",
            "test_toy_agents.py::test_a_baseline_over_steps_is_biased",
            "test_toy_agents.py::test_a_baseline_over_steps_climbs_against_the_share_of_calls_in_successes",
        ),
        exercises=("08.2", "08.3", "08.4"),
    ),
    Entry(
        lesson=8,
        heading="5 What weight does a segment deserve?",
        name="one vote a trajectory",
        formula=r"w_{ik}=1/(N\cdot\text{its tokens})",
        functions=("losses.token_weights",),
        tests=(
            "test_losses.py::test_owners_are_one_vote_each",
            "test_trajectories.py::test_a_trajectory_has_one_vote_however_many_segments_it_has",
        ),
        exercises=("08.5",),
        verl="`actor.loss_agg_mode=seq-mean-token-mean` gives a vote to each row, so to each segment",
    ),
    Entry(
        lesson=8,
        heading="7 Efficiency",
        name="efficiency among successes",
        formula=r"\mathrm{clip}\big((\bar c-c_i)/\bar c,\,-1,\,1\big)",
        functions=("advantages.efficiency_advantages",),
        tests=(
            "test_advantages.py::test_cheap_successes_get_more_and_failures_nothing",
            "test_advantages.py::test_efficiency_climbs_the_price_of_a_success",
        ),
        exercises=("08.6",),
    ),
    Entry(
        lesson=10,
        heading="1 What a GPU changes",
        name="time of a decoding step",
        formula=r"\max\big(\tfrac{\text{bytes}}{\text{bandwidth}},\tfrac{2PB}{\text{peak}}\big)",
        functions=("costs.decode_bytes", "costs.forward_flops"),
        tests=("test_costs.py::test_decoding_reads_the_matrices_once_for_all_rows",),
    ),
    Entry(
        lesson=10,
        heading="2 Part A: sums and differences of two digits",
        name="pass@k",
        formula=r"1-\tbinom{n-c}{k}/\tbinom{n}{k}",
        functions=("runs.pass_at_k", "runs.Evaluation.pass_at", "runs.read_run"),
        tests=(
            "test_runs.py::test_pass_at_k_is_the_mean_over_all_subsets",
            "test_runs.py::test_pass_at_k_is_unbiased",
        ),
        exercises=("10.1", "10.2"),
    ),
    Entry(
        lesson=10,
        heading="3 Part B: research with one page and one line of notes",
        name="warm start, and its adapter",
        formula=r"\tfrac{1}{N}\sum\log\pi_\theta(y^*),\ W-W_0\approx LR^\top",
        functions=("warm_start.warm_start", "models.save_adapter", "models.add_adapter"),
        tests=(
            "test_warm_start.py::test_gradient_is_that_of_reinforce_with_advantage_one",
            "test_models.py::test_an_adapter_keeps_a_change_of_its_rank_and_the_nearest_of_a_larger_one",
        ),
    ),
    Entry(
        lesson=10,
        heading="3 Part B: research with one page and one line of notes",
        name="a research agent and its recorded attempts",
        formula=r"c_{j+1}=f(c_j,y_j,o_j)",
        functions=("research.ResearchTask", "sampling.replay"),
        tests=(
            "test_research_runs.py::test_only_an_agent_with_notes_fits_the_budget",
            "test_research_runs.py::test_from_warm_start_to_a_recorded_run",
        ),
        exercises=("10.3",),
    ),
    Entry(
        lesson=10,
        heading="4 What would change at 7 billion parameters",
        name="memory of a step",
        formula=r"16P+4P_{\text{ref}}+16P_{\text{critic}}+\text{activations}+\dots",
        functions=("costs.step_memory", "costs.activation_bytes", "costs.cache_bytes"),
        tests=("test_costs.py::test_the_formula_explains_the_measured_memory",),
        exercises=("10.4",),
    ),
    Entry(
        lesson=10,
        heading="4 What would change at 7 billion parameters",
        name="model FLOP utilisation",
        formula=r"\frac{2P\cdot\text{sampled}+6P\cdot\text{trained}}{\text{seconds}\cdot\text{peak}}",
        functions=("costs.model_flops_utilisation", "runs.Run.throughput"),
        tests=("test_costs.py::test_utilisation",),
    ),
)
