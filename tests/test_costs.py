"""Costs worked out from a shape are those of real models: parameters, operations and bytes are counted."""

import json
import math
import os
import weakref
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from course_lib import costs, logprobs
from course_lib.costs import (
    QWEN25_7B,
    SMOLLM2_135M,
    ModelShape,
    activation_bytes,
    cache_bytes,
    decode_bytes,
    forward_flops,
    logits_bytes,
    model_flops_utilisation,
    step_memory,
    training_flops,
)
from course_lib.logprobs import score_tokens
from course_lib.models import find_small_model, load_small_model, tiny_model
from course_lib.training import _enable_gradient_checkpointing

WIDE = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


def rows(count, length, vocabulary):
    """A batch of sequences without common prefixes, every token but the first of each scored."""
    tokens = torch.arange(count * length).view(count, length).remainder(vocabulary)
    seen = torch.ones_like(tokens)
    mask = seen.clone()
    mask[:, 0] = 0
    return tokens, seen, mask


# -------------------------------------------------------------------------------------------------------- the counts


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("more", [{}, {**WIDE, "head_dim": 20, "num_key_value_heads": 1}])
def test_parameters_are_those_of_the_model(architecture, tied, more):
    model = tiny_model(architecture, tie_word_embeddings=tied, **more)
    shape = ModelShape.of(model.config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    matrices = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    assert shape.layer_matrices == sum(m.weight.numel() for m in matrices)
    assert shape.head == model.get_output_embeddings().weight.numel()


def test_parameters_of_the_presets_are_the_published_ones():
    assert SMOLLM2_135M.parameters == 134_515_008
    assert QWEN25_7B.parameters == 7_615_616_512


@pytest.mark.parametrize("options", [{"architecture": "gpt2"}, {"attention_bias": True}])
def test_another_kind_of_model_is_refused(options):
    with pytest.raises(ValueError, match=r"config: expected that of a llama model .*, got (gpt2|llama)"):
        ModelShape.of(tiny_model(**options).config)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_operations_are_those_that_torch_counts(checkpointing):
    model = tiny_model(vocab_size=50, **WIDE)
    model.set_attn_implementation("eager")  # whose products the counter sees one by one
    shape, (tokens, seen, mask) = ModelShape.of(model.config), rows(3, 9, 50)
    scored = 3 * 8  # one node less a row: its last token is only predicted
    assert logprobs.supports_tree(model)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        score_tokens(model, tokens, seen, mask)
    assert counted.get_total_flops() == forward_flops(shape, scored, scored)
    if checkpointing:
        _enable_gradient_checkpointing(model)
    with FlopCounterMode(display=False) as counted:
        score_tokens(model, tokens, seen, mask).log_probs.sum().backward()
    expected = training_flops(shape, scored, scored, checkpointing=checkpointing)
    # Recomputing a layer ends with what the backward pass needs, so before its last product.
    assert counted.get_total_flops() == pytest.approx(expected, rel=0.06 if checkpointing else 0)


def test_the_output_matrix_is_run_where_a_token_is_predicted():
    few, all_ = (forward_flops(SMOLLM2_135M, 100, 50, predicted=m) for m in (10, None))
    assert all_ - few == 2 * 90 * SMOLLM2_135M.head


def test_the_cache_holds_what_the_formula_says():
    model = tiny_model(**WIDE, num_key_value_heads=2)
    cache = model(torch.arange(11)[None], use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == cache_bytes(ModelShape.of(model.config), 11)


def test_decoding_reads_the_matrices_once_for_all_rows():
    one, many = (decode_bytes(QWEN25_7B, rows, 1000) for rows in (1, 65))
    assert one == 2 * (QWEN25_7B.layer_matrices + QWEN25_7B.head) + 1000 * 57_344
    assert many - one == 64 * 1000 * 57_344
    assert decode_bytes(QWEN25_7B, 1, 1000, precision="float32") == 2 * one


def test_utilisation():
    shape, seconds = QWEN25_7B, 3.0
    flops = forward_flops(shape, 500, 0) + training_flops(shape, 1000, 0)
    share = model_flops_utilisation(shape.parameters, sampled=500, trained=1000, seconds=seconds, peak_flops=1e15)
    assert share == pytest.approx(flops / seconds / 1e15, rel=0.08)  # an embedding of its own is looked up
    with pytest.raises(ValueError, match="peak_flops: expected a finite number > 0, got 0"):
        model_flops_utilisation(1, sampled=1, trained=1, seconds=1, peak_flops=0)


# ------------------------------------------------------------------------------------------------------- the memory


def saved_bytes(model, batch, precision):
    """Bytes of the distinct storages that autograd keeps of one pass, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    assert logprobs.supports_tree(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scored = score(model, batch, precision)
    assert scored.requires_grad
    return sum(size for size, _ in kept.values())


def score(model, batch, precision):
    with torch.autocast("cpu", dtype=DTYPES[precision], enabled=precision != "float32"):
        return score_tokens(model, *batch).log_probs


def expected_bytes(model, tokens, predicted, precision):
    """Of the formulas: layers, logits, and 2-byte copies of the matrices where there are any."""
    shape = ModelShape.of(model.config)
    logits = logits_bytes(shape, predicted, precision=precision) - 8 * predicted * shape.vocabulary
    copies = 2 * (shape.layer_matrices + shape.head) if precision == "bfloat16" else 0
    return activation_bytes(shape, tokens, precision=precision) + logits + copies


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("count", "length"), [(4, 9), (4, 41)])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_activations_are_those_that_autograd_keeps(precision, count, length, kv_heads):
    model = tiny_model(vocab_size=50, **WIDE, num_key_value_heads=kv_heads)
    nodes = count * (length - 1)
    found = saved_bytes(model, rows(count, length, 50), precision)
    assert found == pytest.approx(expected_bytes(model, nodes, nodes, precision), rel=0.15)


class Live(TorchDispatchMode):
    """Bytes of the tensors that are made while it is on and live, now and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known | given:
                    self._count(storage)
        self.most = max(self.most, self.now)
        return made

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += size

        def gone():
            self.known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_a_pass_is_that_of_the_formula(precision, checkpointing, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK", 8 * 200)  # as small beside the whole as it is for a real vocabulary
    model = tiny_model(vocab_size=200, **{**WIDE, "num_hidden_layers": 10}, num_key_value_heads=2)
    batch, shape = rows(4, 41, 200), ModelShape.of(model.config)
    assert logprobs.supports_tree(model)
    if checkpointing:
        _enable_gradient_checkpointing(model)
    with Live() as live:
        for _ in range(2):  # the second row of a batch meets the gradients of the first
            score(model, batch, precision).sum().backward()
    parts = step_memory(shape, row=160, predicted=160, cached=0, precision=precision, checkpointing=checkpointing)
    assert live.most == pytest.approx(parts["peak"] - parts["weights"] - parts["moments"], rel=0.15)


def test_the_logits_are_made_in_the_chunks_that_the_formula_knows():
    assert costs.KEPT_LOGITS == logprobs.KEPT_LOGITS
    assert logits_bytes(QWEN25_7B, 10**6, precision="bfloat16") == logprobs.KEPT_LOGITS * 10


def test_the_parts_of_a_step():
    options = {"row": 1024, "predicted": 900, "cached": 8000}
    plain = step_memory(SMOLLM2_135M, **options)
    model = 4 * SMOLLM2_135M.parameters
    assert plain["weights"] == plain["gradients"] == plain["moments"] / 2 == model
    assert plain["peak"] == 4 * model + plain["activations"] + plain["logits"]
    assert step_memory(SMOLLM2_135M, **options, reference=True)["peak"] == plain["peak"] + model
    assert step_memory(SMOLLM2_135M, **options, critic=True)["peak"] == plain["peak"] + 4 * model
    sampling = step_memory(SMOLLM2_135M, **{**options, "cached": 10**6})
    assert sampling["peak"] == 3 * model + sampling["cache"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", DTYPES)
def test_activations_of_the_small_model(precision):
    if not os.path.exists(find_small_model()):
        pytest.skip("the small model is not on this machine")
    model, _ = load_small_model(device="cpu")
    assert ModelShape.of(model.config) == SMOLLM2_135M
    batch = rows(4, 49, 40_000)
    found = saved_bytes(model, batch, precision)
    assert found == pytest.approx(expected_bytes(model, 192, 192, precision), rel=0.15)


def test_the_formula_explains_the_measured_memory():
    """Peaks of processes as benchmarks/results.json has them: the formula, and one number for all that is no tensor."""
    results = json.loads((Path(__file__).parents[1] / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    found = [(way["peak_gib"], _formula(way) / 2**30) for way in results["memory"]]
    rest = median(measured - formula for measured, formula in found)
    assert 0.3 < rest < 1.5
    assert [formula + rest for _, formula in found] == pytest.approx([measured for measured, _ in found], rel=0.1)


def _formula(way):
    """4 × 4 replies of 54 tokens: of 1,008 nodes 852 predict."""
    row = min(way["tokens_per_row"], way["tokens_run"])
    options = {"cached": 0, "checkpointing": way["checkpointing"]}
    return step_memory(SMOLLM2_135M, row=row, predicted=row * 852 // 1008, **options)["peak"]


@pytest.mark.parametrize("value", [None, "3", math.nan, math.inf, -1, 10**400, [1]])
def test_counts_are_finite_numbers(value):
    shape = costs.SMOLLM2_135M
    rest = {"sampled": 1, "trained": 1, "seconds": 1, "peak_flops": 1}
    for name, call in {
        "tokens": lambda: costs.forward_flops(shape, value, 5),
        "context": lambda: costs.training_flops(shape, 5, value),
        "rows": lambda: costs.decode_bytes(shape, value, 5),
        "tokens ": lambda: costs.cache_bytes(shape, value),
        " tokens": lambda: costs.layer_bytes(shape, value),
        "tokens  ": lambda: costs.activation_bytes(shape, value, checkpointing=True),
        "predicted": lambda: costs.logits_bytes(shape, value),
        "cached": lambda: costs.step_memory(shape, row=1, predicted=1, cached=value),
        "parameters": lambda: costs.model_flops_utilisation(value, **rest),
        "seconds": lambda: costs.model_flops_utilisation(1, **rest | {"seconds": value}),
    }.items():
        with pytest.raises(ValueError, match=f"^{name.strip()}: expected a finite number"):
            call()


def test_shapes_and_precisions_are_known_ones():
    with pytest.raises(ValueError, match='precision: expected one of "float32", "bfloat16", got '):
        costs.cache_bytes(costs.SMOLLM2_135M, 1, precision="float16")
    with pytest.raises(ValueError, match="shape: expected a ModelShape, got None"):
        costs.forward_flops(None, 1, 1)
    for width in (0, 1.5, math.nan, None):
        with pytest.raises(ValueError, match="width: expected a whole number of at least 1"):
            replace(costs.SMOLLM2_135M, width=width)
    with pytest.raises(ValueError, match="config: expected that of a llama model without biases"):
        costs.ModelShape.of(tiny_model("llama", mlp_bias=True).config)
