"""What GRPO costs in operations and in bytes, worked out from the shape of the model: one formula a function.

No tensors here: these are products of a few integers, to be checked by hand and used before a machine is paid for.

P are parameters, L layers, D the width, H heads, K key-value heads, d the size of a head, F the width of the
feed-forward part, V the vocabulary; N tokens of a row, M places of it that predict a token, C tokens that each one
attends to, B rows that are decoded together. A multiplication and an addition are two operations (FLOPs). Norms,
softmax, rotations and the optimizer's arithmetic are left out: they cost time, and next to no operations.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from course_lib._tensors import require, require_choice, require_number, require_whole

Precision = Literal["float32", "bfloat16"]

BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}
PEAK_FLOPS = {"H200": 989e12, "H100 SXM": 989e12, "A100": 312e12, "L4": 121e12, "RTX 4090": 165e12}
"""Dense bfloat16 operations a second with float32 sums, as published: NVIDIA's data sheets of the H200, H100, A100 and
L4 Tensor Core GPUs (those of H200, H100 and L4 quote twice as much, "with sparsity") and the white paper of the Ada GPU
architecture for the RTX 4090."""
KEPT_LOGITS = 2**25
"""Logits that `logprobs.score_tokens` works on at a time."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama-style model: gated feed-forward part, RMS norms, grouped keys and values.

    Attributes:
        layers: L.
        width: D.
        heads: H.
        kv_heads: K.
        head_size: d.
        feed_forward: F.
        vocabulary: V.
        tied: whether the output matrix is the embedding.
        qkv_bias: whether queries, keys and values have biases, as in Qwen2.

    Raises:
        ValueError: a size that is no whole number of at least 1.

    Example:
        >>> f"{SMOLLM2_135M.parameters:,}", f"{QWEN25_7B.parameters:,}"
        ('134,515,008', '7,615,616,512')
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False

    def __post_init__(self):
        for name, value in asdict(self).items():
            if name not in ("tied", "qkv_bias"):
                require_whole(name, value, 1)

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """The shape that a transformers configuration describes.

        Raises:
            ValueError: a model of another kind.
        """
        kind = getattr(config, "model_type", type(config).__name__)
        biases = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
        if kind not in ("llama", "qwen2") or biases:
            raise ValueError(f"config: expected that of a llama model without biases or of a qwen2 model, got {kind}")
        return cls(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            feed_forward=config.intermediate_size,
            vocabulary=config.vocab_size,
            tied=config.tie_word_embeddings,
            qkv_bias=kind == "qwen2",
        )

    @property
    def layer_matrices(self) -> int:
        """Numbers in the matrices of all layers: L · (2·D·H·d + 2·D·K·d + 3·D·F)."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_size
        return self.layers * (attention + 3 * self.width * self.feed_forward)

    @property
    def head(self) -> int:
        """Numbers in the output matrix: V · D."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """P: matrices, embedding (once where it is also the output matrix), 2·L + 1 norms, biases."""
        embeddings = self.head if self.tied else 2 * self.head
        norms = (2 * self.layers + 1) * self.width
        biases = self.qkv_bias * self.layers * (self.heads + 2 * self.kv_heads) * self.head_size
        return self.layer_matrices + embeddings + norms + biases


SMOLLM2_135M = ModelShape(
    layers=30, width=576, heads=9, kv_heads=3, head_size=64, feed_forward=1536, vocabulary=49152, tied=True
)
QWEN25_7B = ModelShape(
    layers=28, width=3584, heads=28, kv_heads=4, head_size=128, feed_forward=18944, vocabulary=152064, tied=False,
    qkv_bias=True,
)  # fmt: skip


def _check(shape: ModelShape, precision: str = "float32", **counts: float) -> None:
    require(isinstance(shape, ModelShape), "shape", "a ModelShape", f"{shape!r:.80}")
    require_choice("precision", precision, BYTES)
    for name, value in counts.items():
        require_number(name, value, "a finite number ≥ 0", lambda n: 0 <= n < math.inf)


# ------------------------------------------------------------------------------------------------------ operations


def forward_flops(shape: ModelShape, tokens: int, context: float, *, predicted: int | None = None) -> float:
    """Operations of a forward pass over N tokens: 2·P_layers·N + 4·L·H·d·C·N + 2·V·D·M.

    Every number of a matrix is multiplied once for a token; attention multiplies a query with C keys, and C weights
    with values. The first term is the whole of it for short rows: it is the "2·P a token" of the literature.

    Args:
        shape: of the model.
        tokens: N.
        context: C on average. (N + 1) / 2 in a causal row of its own; N where a kernel works off the whole square and
            then masks it, as with the mask of a token tree.
        predicted: M, places where the output matrix is applied; N where None.

    Returns:
        Operations.

    Source:
        Kaplan et al. (2020), Scaling laws for neural language models, arXiv 2001.08361, section 2.1.

    Example:
        >>> round(forward_flops(SMOLLM2_135M, tokens=1, context=0) / SMOLLM2_135M.parameters, 2)
        2.0
    """
    predicted = tokens if predicted is None else predicted
    _check(shape, tokens=tokens, context=context, predicted=predicted)
    attention = 4 * shape.layers * shape.heads * shape.head_size * context
    return (2 * shape.layer_matrices + attention) * tokens + 2 * shape.head * predicted


def training_flops(
    shape: ModelShape, tokens: int, context: float, *, predicted: int | None = None, checkpointing: bool = False
) -> float:
    """Operations of a forward and a backward pass: 3 × forward, 4 × in the layers where activations are recomputed.

    Backward, each product of the forward pass takes two: one for the gradient of the input, one for that of the matrix.

    Args:
        shape: of the model.
        tokens, context, predicted: as for `forward_flops`.
        checkpointing: whether the layers are run a second time in the backward pass.

    Returns:
        Operations.

    Example:
        >>> training_flops(SMOLLM2_135M, 100, 50) / forward_flops(SMOLLM2_135M, 100, 50)
        3.0
    """
    again = forward_flops(shape, tokens, context, predicted=0) if checkpointing else 0
    return 3 * forward_flops(shape, tokens, context, predicted=predicted) + again


def decode_bytes(shape: ModelShape, rows: int, context: float, *, precision: Precision = "bfloat16") -> float:
    """Bytes read to decode one more token in each of B rows: the matrices once for all, the cache of each row.

    w · (P_layers + V·D) + B · C · 2·L·K·d·w

    The pass takes `forward_flops(shape, rows, context)` operations. With few rows that is next to nothing a byte, and
    the pass lasts as long as the memory needs to read the matrices: more rows are then nearly free.

    Args:
        shape: of the model.
        rows: B.
        context: C, tokens in the cache of a row.
        precision: of matrices and cache.

    Returns:
        Bytes.

    Source:
        Pope et al. (2022), Efficiently scaling transformer inference, arXiv 2211.05102, section 2.

    Example:
        >>> [round(forward_flops(QWEN25_7B, rows, 500) / decode_bytes(QWEN25_7B, rows, 500)) for rows in (1, 64, 1024)]
        [1, 57, 338]
    """
    _check(shape, precision, rows=rows, context=context)
    width = BYTES[precision]
    return width * (shape.layer_matrices + shape.head) + cache_bytes(shape, rows * context, precision=precision)


def model_flops_utilisation(
    parameters: int, *, sampled: float, trained: float, seconds: float, peak_flops: float
) -> float:
    """Share of a machine's peak that went into the model: (2·P·sampled + 6·P·trained) / (seconds · peak).

    It counts what the algorithm needs and not what was run: recomputed activations are left out, and so are attention
    and the reading of prompts before sampling, which makes it a little too small.

    Args:
        parameters: P.
        sampled: tokens drawn.
        trained: tokens run forward and backward.
        seconds: that both took.
        peak_flops: operations a second of all devices together, see `PEAK_FLOPS`.

    Returns:
        A fraction.

    Raises:
        ValueError: a number that is negative or not finite; seconds or peak_flops of 0.

    Source:
        Chowdhery et al. (2022), PaLM, arXiv 2204.02311, appendix B.

    Example:
        >>> model_flops_utilisation(10**9, sampled=1e5, trained=2e5, seconds=7.0, peak_flops=1e15)
        0.2
    """
    for name, value in (("parameters", parameters), ("sampled", sampled), ("trained", trained)):
        require_number(name, value, "a finite number ≥ 0", lambda n: 0 <= n < math.inf)
    for name, value in (("seconds", seconds), ("peak_flops", peak_flops)):
        require_number(name, value, "a finite number > 0", lambda n: 0 < n < math.inf)
    return parameters * (2 * sampled + 6 * trained) / (seconds * peak_flops)


# ---------------------------------------------------------------------------------------------------------- memory


def cache_bytes(shape: ModelShape, tokens: float, *, precision: Precision = "float32") -> float:
    """Keys and values of the tokens that a decoder has seen: 2 · L · K · d · w bytes each.

    Example:
        >>> cache_bytes(QWEN25_7B, 1, precision="bfloat16")
        57344
    """
    _check(shape, precision, tokens=tokens)
    return 2 * shape.layers * shape.kv_heads * shape.head_size * BYTES[precision] * tokens


def layer_bytes(shape: ModelShape, tokens: int, *, precision: Precision = "float32") -> int:
    """What one layer keeps of a row of N tokens for the backward pass.

    For each token, in numbers:

    | | float32 | bfloat16 autocast |
    |---|---|---|
    | residual stream and its norm, twice a layer | 4·D in 4 bytes | 4·D in 4 bytes |
    | inputs of the matrices of attention and feed-forward part | 2·D | 5·D, a copy for each of the five |
    | queries, keys, values, result of attention | 4·H·d | 4·H·d |
    | gate, its activation, the other half, their product | 4·F | 4·F |
    | attention mask | N | N |
    | statistics of norms and softmax | H + 2 in 4 bytes | H + 2 in 4 bytes |

    Keys and values count with all H heads, since they are repeated for the kernel that takes a mask. The mask is why
    memory grows with the square of a row.

    Args:
        shape: of the model.
        tokens: N, tree nodes of the row.
        precision: "float32" or "bfloat16" (autocast: the residual stream and the norms stay float32).

    Returns:
        Bytes.

    Source:
        Korthikanti et al. (2022), Reducing activation recomputation in large transformer models, arXiv 2205.05198,
        count the layers of GPT in this way.

    Example:
        >>> [round(layer_bytes(SMOLLM2_135M, row) / 2**20) for row in (1024, 2048, 4096)]
        [51, 109, 250]
    """
    _check(shape, precision, tokens=tokens)
    narrow, attention = BYTES[precision], shape.heads * shape.head_size
    inputs = 2 if precision == "float32" else 5
    wide = 4 * (4 * shape.width + shape.heads + 2)
    return tokens * (wide + narrow * (inputs * shape.width + 4 * attention + 4 * shape.feed_forward + tokens))


def activation_bytes(
    shape: ModelShape, tokens: int, *, precision: Precision = "float32", checkpointing: bool = False
) -> int:
    """What all layers keep of a row of N tokens: L · `layer_bytes`, or L · N · D · 4, their inputs, with checkpointing.

    With gradient checkpointing one layer at a time is run again in the backward pass and has its `layer_bytes` then.

    Args:
        shape, tokens, precision: as for `layer_bytes`.
        checkpointing: whether the layers are recomputed.

    Returns:
        Bytes.

    Source:
        Chen et al. (2016), Training deep nets with sublinear memory cost, arXiv 1604.06174.

    Example:
        >>> [round(activation_bytes(SMOLLM2_135M, 1024, checkpointing=on) / 2**20) for on in (False, True)]
        [1516, 68]
    """
    _check(shape, precision, tokens=tokens)
    one = 4 * shape.width * tokens if checkpointing else layer_bytes(shape, tokens, precision=precision)
    return shape.layers * one


def logits_bytes(
    shape: ModelShape, predicted: int, *, precision: Precision = "float32", kept: int = KEPT_LOGITS
) -> int:
    """What M rows of logits take: the logits, and twice as many float32 numbers while their softmax is made.

    min(M · V, kept) · (w + 8). Beyond `kept` numbers `logprobs.score_tokens` makes them a chunk at a time.

    Example:
        >>> round(logits_bytes(SMOLLM2_135M, 400) / 2**20), round(logits_bytes(SMOLLM2_135M, 10**6) / 2**20)
        (225, 384)
    """
    _check(shape, precision, predicted=predicted, kept=kept)
    return min(predicted * shape.vocabulary, kept) * (BYTES[precision] + 8)


def step_memory(
    shape: ModelShape,
    *,
    row: int,
    predicted: int,
    cached: int,
    precision: Precision = "float32",
    checkpointing: bool = False,
    reference: bool = False,
    critic: bool = False,
) -> dict[str, float]:
    """Bytes of each part of a GRPO step with AdamW and float32 weights, and of the whole at its peak.

    Weights 4·P, gradients 4·P, moments 8·P; the reference model of a KL penalty 4·P; the critic of PPO, a second model
    of this size that is trained, 16·P. While a batch is sampled there is a cache; from the second row of an update on
    there are gradients and the activations of the row. The peak is the larger of the two,

        weights + moments + reference + critic + copies + cache   and, in place of the last two,
        gradients + activations + max(copies + logits, recomputed layer).

    Args:
        shape: of the model.
        row: N, tokens of one forward and backward pass (`GRPOConfig.tokens_per_row`).
        predicted: M, places of the row that predict a trained token.
        cached: tokens whose keys and values the sampler holds: B · (context + reply).
        precision: of autocast; "bfloat16" makes 2-byte copies of the matrices for a pass.
        checkpointing: whether layers are recomputed.
        reference: whether there is a reference model.
        critic: whether there is a critic, whose activations come one after the policy's.

    Returns:
        Bytes by part, and their "peak".

    Example:
        >>> parts = step_memory(QWEN25_7B, row=4096, predicted=2048, cached=0, precision="bfloat16", checkpointing=True)
        >>> [(name, round(parts[name] / 2**30, 1)) for name in ("weights", "activations", "recomputed", "peak")]
        [('weights', 28.4), ('activations', 1.5), ('recomputed', 1.1), ('peak', 128.5)]
    """
    _check(shape, precision, row=row, predicted=predicted, cached=cached)
    model = 4 * shape.parameters
    parts = {
        "weights": model,
        "gradients": model,
        "moments": 2 * model,
        "copies": 2 * (shape.layer_matrices + shape.head) if precision == "bfloat16" else 0,
        "activations": activation_bytes(shape, row, precision=precision, checkpointing=checkpointing),
        "recomputed": layer_bytes(shape, row, precision=precision) if checkpointing else 0,
        "logits": logits_bytes(shape, predicted, precision=precision),
        "cache": cache_bytes(shape, cached),  # autocast leaves the keys, which a norm or a rotation made, in float32
        "reference": model if reference else 0,
        "critic": 4 * model if critic else 0,
    }
    lasting = sum(parts[name] for name in ("weights", "moments", "reference", "critic"))
    sampling = parts["copies"] + parts["cache"]
    pass_ = max(parts["copies"] + parts["logits"], parts["recomputed"])
    return parts | {"peak": lasting + max(sampling, parts["gradients"] + parts["activations"] + pass_)}
