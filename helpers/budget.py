"""Chapter 09: the bytes of a training step of a GPT, from its sizes alone, without making it."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

Precision = Literal["fp32", "amp", "bf16"]
OptimizerName = Literal["none", "sgd", "momentum", "adam", "fused adam"]
Attention = Literal["fused", "matrix"]
Checkpointing = Literal["none", "blocks"]
Sharding = Literal["ddp", "zero1", "zero2", "zero3"]


def parameter_count(*, vocabulary: int, context: int, layers: int, width: int) -> int:
    """Return the number of parameters of `helpers.models.GPT`; dropout and heads add none."""
    # qkv 3, projection 1, MLP 4 + 4; biases 3 + 1 + 4 + 1, two norms 2 + 2
    block = 12 * width * width + 13 * width
    return vocabulary * width + context * width + layers * block + 2 * width


def tokens_per_update(*, context: int, micro_batch: int, accumulation: int, gpus: int) -> int:
    """Return how many tokens all GPUs together see between two updates."""
    return context * micro_batch * accumulation * gpus


def block_bytes(
    *,
    micro_batch: int,
    context: int,
    heads: int,
    width: int,
    precision: Precision,
    attention: Attention,
) -> dict[str, int]:
    """Return what one block of the GPT saves for backward, in bytes; see `step_bytes`.

    input: x, [B, T, C]. attention: norm, qkv, attention and projection. scores: the part of it
    that grows with the square of the context. mlp: norm, two layers, GELU. Weights do not count.
    """
    if width % heads:
        raise ValueError(f"width {width} cannot be split into {heads} heads")

    tokens = micro_batch * context
    stream = {"fp32": 4, "amp": 4, "bf16": 2}[precision] * tokens * width  # of x
    operand = {"fp32": 4, "amp": 2, "bf16": 2}[precision] * tokens * width  # of a matrix product
    # a norm saves its input, and of each token the mean and 1 / deviation
    statistics = {"fp32": 8, "amp": 8, "bf16": 4}[precision] * tokens

    if attention == "fused":
        # q, k, v as the one output of qkv; the logarithm of each row's sum, in float32; the result
        scores = 0
        attended = 3 * operand + 4 * heads * tokens + operand
    else:
        # q, k (scaled) and v, copied to float32; the probabilities of all pairs; the result.
        # In float32 nothing is cast: with one sequence or one head, v is a view of all of qkv
        scores = {"matrix": 4}[attention] * heads * tokens * context
        view = precision == "fp32" and (micro_batch == 1 or heads == 1)
        attended = 3 * 4 * tokens * width + (2 * operand if view else 0) + scores + operand
    return {
        "input": stream,
        # the output of the norm is the input of qkv; the result is the input of the projection
        "attention": statistics + operand + attended,
        "scores": scores,
        # x after attention, the norm; GELU saves its input, the last layer GELU's output
        "mlp": stream + statistics + operand + 4 * operand + 4 * operand,
    }


def step_bytes(
    *,
    vocabulary: int,
    context: int,
    layers: int,
    heads: int,
    width: int,
    micro_batch: int,
    precision: Precision = "fp32",
    optimizer: OptimizerName = "adam",
    attention: Attention = "fused",
    checkpointing: Checkpointing = "none",
    accumulation: int = 1,
    gpus: int = 1,
) -> dict[str, dict[str, int]]:
    """Return what one GPU holds at seven moments of a step of `helpers.models.GPT`, in bytes.

    {"forward": {"parameters": …, "activations": …, …}, "loss": {…}, …}: at each moment the parts
    add up to the bytes alive; the largest sum is the peak (see `peak_bytes`). In order of time:

    forward       the loss has just been computed, all activations are there
    loss          backward begins: the gradient of the logits is computed
    head          the gradient of the token matrix, which is also the output layer's weight
    last block    backward in the block next to the loss, where the fewest activations are freed
    first block   backward in the block next to the input, where almost all gradients are there
    embeddings    the second gradient of the token matrix, from the embedding
    update        the optimizer's step

    vocabulary, context, layers, heads, width: the sizes of the model, as in `GPTConfig`; dropout 0.
    micro_batch: sequences at once on one GPU, each as long as `context`.
    precision: "fp32"; "amp": float32 weights under autocast to bfloat16 or float16; "bf16": all.
    optimizer: "none", "sgd", "momentum", "adam" (or AdamW, as PyTorch runs it on a GPU: with
        foreach), "fused adam" (with `fused=True`).
    attention: "fused", or "matrix": the scores of all pairs in memory (`SDPBackend.MATH`).
    checkpointing: "none", or "blocks": `torch.utils.checkpoint` around every block.
    accumulation: micro-batches for each update. gpus: under DDP; more than one adds its buckets.

    Counted are the bytes of tensors, in a loop that is no longer in its first step, frees the
    gradients after it (`zero_grad()`), and keeps no logits: `loss = loss_fn(model, batch)`. Not
    counted: what the CUDA context and its libraries take, scratch memory inside operations,
    what the caching allocator rounds up or cannot use. On a GPU the fused kernels may pad heads
    and their statistics, and layer norm keeps its statistics in float32 for "bf16", too.
    """
    if min(vocabulary, context, layers, heads, width, micro_batch, accumulation, gpus) < 1:
        raise ValueError("every size must be at least 1")

    number = {"fp32": 4, "amp": 4, "bf16": 2}[precision]  # bytes of a weight
    half = {"fp32": 4, "amp": 2, "bf16": 2}[precision]  # of a number in a matrix product
    tokens = micro_batch * context

    # ---- what stays from step to step
    matrix = vocabulary * width  # of the tokens: input and output share it
    square = width * width
    parameters = number * parameter_count(
        vocabulary=vocabulary, context=context, layers=layers, width=width
    )
    state = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2, "fused adam": 2}[optimizer] * parameters
    gradients = parameters
    buckets = parameters if gpus > 1 else 0  # DDP copies gradients to them and back
    kept = gradients if accumulation > 1 else 0  # those of earlier micro-batches

    # ---- activations: of the blocks, of the last norm; indices are int64
    saved = block_bytes(
        micro_batch=micro_batch,
        context=context,
        heads=heads,
        width=width,
        precision=precision,
        attention=attention,
    )
    stream = saved["input"]
    inside = saved["attention"] + saved["mlp"]
    recomputed = {"none": 0, "blocks": inside}[checkpointing]  # of a block, in backward
    blocks = layers * (stream + inside - recomputed)
    operand = half * tokens * width
    statistics = 2 * number * tokens
    last_norm = stream + statistics + operand  # its output is the input of the head
    batch = 2 * 8 * tokens
    indices = batch + 8 * context + number  # and the number that the mean is divided by
    logits = number * tokens * vocabulary  # their log-softmax is float32 under autocast, too

    # ---- autocast casts each weight once and saves the copy; backward frees it, block by block
    cast = 2 if precision == "amp" else 0
    block_copies = cast * 12 * square
    head_copy = cast * matrix
    copies = layers * (0 if recomputed else block_copies)

    # ---- what lives only for a moment
    # forward: the logits, and under autocast their float32 twin, beside the log-softmax; or, where
    # nothing inside of a block is saved, the inside of the last block
    at_loss = half * tokens * vocabulary + (logits if cast else 0)
    in_block = 2 * stream + 12 * operand - last_norm - cast * (matrix + 4 * square)
    all_copies = cast * (layers * (12 * square + 9 * width) + matrix)
    # backward of the MLP: the gradients of the block's output (under autocast also cast), of the
    # output of GELU, and of the last weight. By then the block has been recomputed. Backward of
    # attention: the gradients of the probabilities and of the scores; what the MLP saved is gone.
    # Backward of qkv, for few tokens: all weights' gradients; only the first norm is left.
    finished = 0 if kept else 9 * number * square
    in_mlp = stream + cast * tokens * width + 4 * operand + 4 * half * square
    in_attention = 2 * saved["scores"] - 10 * operand - statistics + finished - 9 * cast * square
    in_qkv = finished + (3 * number - 9 * cast) * square + statistics - inside
    in_backward = max(in_mlp, in_attention, in_qkv + stream + (stream if cast else 5 * operand))
    below = number * (context * width + 12 * square + 13 * width)  # of positions and first block
    shared = number * matrix  # the gradient of the matrix that input and output share

    always = {"parameters": parameters, "optimizer": state, "buckets": buckets}
    return {
        "forward": {
            **always,
            "gradients": kept,
            "copies": all_copies,
            "activations": blocks + last_norm + indices,
            "loss": logits + at_loss,
            "temporary": max(in_block - logits - at_loss, 0) if recomputed else 0,
        },
        "loss": {
            **always,
            "gradients": kept,
            "copies": copies + head_copy,
            "activations": blocks + last_norm + indices,
            "loss": 3 * logits,  # log-softmax, its gradient, the gradient of the logits
            "temporary": 0,
        },
        "head": {
            **always,
            "gradients": kept,
            "copies": copies + head_copy,
            "activations": blocks + last_norm + indices,
            "loss": half * tokens * vocabulary,
            "temporary": half * matrix + operand,
        },
        "last block": {
            **always,
            "gradients": kept + shared,
            "copies": layers * block_copies if not recomputed else block_copies,
            "activations": blocks + recomputed + indices,
            "loss": 0,
            "temporary": in_backward,
        },
        "first block": {
            **always,
            "gradients": kept + shared if kept else gradients - below,
            "copies": block_copies,
            "activations": stream + inside + indices,
            "loss": 0,
            "temporary": in_backward,
        },
        "embeddings": {
            **always,
            "gradients": gradients,
            "copies": 0,
            "activations": indices,
            "loss": 0,
            # the second gradient of the matrix, and the sum of both: a third tensor, or after a
            # cast written into the first
            "temporary": shared + (stream if cast else shared) + (shared if kept else 0),
        },
        "update": {
            **always,
            "gradients": gradients,
            "copies": 0,
            "activations": batch,
            "loss": 0,
            "temporary": parameters if optimizer == "adam" else 0,
        },
    }


def rank_bytes(
    *,
    vocabulary: int,
    context: int,
    layers: int,
    width: int,
    precision: Precision = "fp32",
    optimizer: OptimizerName = "adam",
    sharding: Sharding = "zero3",
    gpus: int = 1,
) -> dict[str, dict[str, int]]:
    """Return what one of several GPUs holds of `helpers.models.GPT` and its optimizer, in bytes.

    {"forward": {"parameters": …, "gathered": …, "gradients": …, "optimizer": …, "buckets": …}, …},
    at the moments

    block      in forward: the last block computes
    forward    the loss has just been computed
    update     after the optimizer's step: what stays, with the gradients

    parameters are those that the optimizer updates; gathered: copies of sharded ones to compute
    with. Activations are not here: no stage of ZeRO changes those of a GPU (`step_bytes`).

    sharding: "ddp": every GPU has everything. "zero1": each has the optimizer's state of its part
    (`ZeroRedundancyOptimizer`). "zero2": parameters and gradients in parts, too; what is gathered
    for forward stays until backward (`fully_shard(…, reshard_after_forward=False)`). "zero3": it
    is freed after each block, the default; True would also free embeddings and last norm.
    precision: "amp" with zero2 and zero3 is `MixedPrecisionPolicy(param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32)`: parts of 4 bytes, gathered copies of 2. Under ddp and zero1 it is
    autocast, whose copies of weights are in `step_bytes`.

    Parts are taken to be equal. FSDP cuts each tensor along its first dimension and fills up the
    last part; ZeroRedundancyOptimizer gives away whole tensors (`whole_tensor_shares`). In "zero2"
    of the ZeRO paper, "gathered" is what it calls parameters, and "parameters" are its master
    weights, a part of the optimizer's state: Rajbhandari et al., 2020, arXiv:1910.02054.
    """
    if min(vocabulary, context, layers, width, gpus) < 1:
        raise ValueError("every size must be at least 1")
    count = parameter_count(vocabulary=vocabulary, context=context, layers=layers, width=width)
    block = 12 * width * width + 13 * width
    number = {"fp32": 4, "amp": 4, "bf16": 2}[precision]
    half = {"fp32": 4, "amp": 2, "bf16": 2}[precision]  # of a gathered copy

    whole = number * count
    states = {"none": 0, "sgd": 0, "momentum": 1, "fused adam": 2, "adam": 2}[optimizer]
    sharded = sharding in ("zero2", "zero3")
    part = (whole + gpus - 1) // gpus
    always = {
        "parameters": part if sharded else whole,
        "gathered": 0,
        "gradients": 0,
        "optimizer": states * (whole if sharding == "ddp" else part),
        # those of DDP; with gradient_as_bucket_view=True they are the gradients
        "buckets": 0 if sharded or gpus == 1 else whole,
    }
    # embeddings and last norm, FSDP's group of the model itself, stay for backward in both
    outside = half * (count - layers * block)
    in_block = {"ddp": 0, "zero1": 0, "zero2": half * count, "zero3": outside + half * block}
    at_loss = {"ddp": 0, "zero1": 0, "zero2": half * count, "zero3": outside}
    return {
        "block": {**always, "gathered": in_block[sharding]},
        "forward": {**always, "gathered": at_loss[sharding]},
        "update": {**always, "gradients": part if sharded else whole},
    }


def rank_step_bytes(
    *,
    vocabulary: int,
    context: int,
    layers: int,
    heads: int,
    width: int,
    micro_batch: int,
    precision: Precision = "fp32",
    optimizer: OptimizerName = "adam",
    attention: Attention = "fused",
    checkpointing: Checkpointing = "none",
    sharding: Sharding = "zero3",
    gpus: int = 1,
) -> dict[str, dict[str, int]]:
    """Return what one of several GPUs holds at the moments of `step_bytes`, in bytes.

    As there, without accumulation, and with the parts of `rank_bytes`. Under zero2 and zero3
    "buckets" is what FSDP sends and receives with: in backward of a block the next one is being
    gathered, and the gradients of the one before are reduced. How long these buffers live depends
    on the network. Here all are alive at once, so for backward this is an estimate, from above.
    """
    states = rank_bytes(
        vocabulary=vocabulary,
        context=context,
        layers=layers,
        width=width,
        precision=precision,
        optimizer=optimizer,
        sharding=sharding,
        gpus=gpus,
    )
    sharded = sharding in ("zero2", "zero3")
    plain = step_bytes(
        vocabulary=vocabulary,
        context=context,
        layers=layers,
        heads=heads,
        width=width,
        micro_batch=micro_batch,
        # MixedPrecisionPolicy computes all in 16 bits; autocast leaves norms and x in 32
        precision="bf16" if sharded and precision == "amp" else precision,
        optimizer=optimizer,
        attention=attention,
        checkpointing=checkpointing,
        gpus=1 if sharded else gpus,
    )
    update = {
        **plain["update"],
        **states["update"],
        "temporary": states["update"]["parameters"] if optimizer == "adam" else 0,
    }
    if sharding == "zero1":
        update = {**update, "temporary": (update["temporary"] + gpus - 1) // gpus}
    if not sharded:
        kept = {"gathered": 0, "optimizer": states["update"]["optimizer"]}
        return {
            "forward": {**plain["forward"], **kept},
            "loss": {**plain["loss"], **kept},
            "head": {**plain["head"], **kept},
            "last block": {**plain["last block"], **kept},
            "first block": {**plain["first block"], **kept},
            "embeddings": {**plain["embeddings"], **kept},
            "update": update,
        }

    number = {"fp32": 4, "amp": 4, "bf16": 2}[precision]
    half = {"fp32": 4, "amp": 2, "bf16": 2}[precision]
    block = 12 * width * width + 13 * width
    matrix = vocabulary * width
    outside = matrix + context * width + 2 * width
    reduced = number * block // gpus  # the gradients of a block that is done
    # the next block twice: as it was received, and cut into its tensors; the gradients of a block
    # as they were computed, and as they are sent
    next_block = half * block if layers > 1 else 0
    sent = (half + number) * block
    # where blocks are gathered anew; and where the last of them computes, or the first
    again = half * block if sharding == "zero3" else 0
    buffers = sent + (2 * next_block if sharding == "zero3" else 0)
    return {
        "forward": {**plain["forward"], **states["forward"]},
        "loss": {**plain["loss"], **states["forward"]},
        "head": {**plain["head"], **states["forward"]},
        "last block": {
            **plain["last block"],
            **states["forward"],
            "gathered": states["forward"]["gathered"] + again,
            "gradients": half * matrix,
            "buckets": buffers,
        },
        "first block": {
            **plain["first block"],
            **states["forward"],
            "gathered": half * (outside + block),
            "gradients": half * matrix + reduced * (layers - 1),
            "buckets": sent,
        },
        "embeddings": {
            **plain["embeddings"],
            **states["forward"],
            "gathered": half * outside,
            "gradients": half * outside + reduced * layers,
            "buckets": number * outside + sent,
        },
        "update": update,
    }


def whole_tensor_shares(sizes: list[int], ranks: int) -> list[int]:
    """Return how much each rank has when whole tensors are given away: the largest one first,

    each to the rank that has least so far, as `ZeroRedundancyOptimizer` does. A tensor that is
    larger than an equal part makes its rank's share larger than that.
    """
    shares = [0] * ranks
    for size in sorted(sizes, reverse=True):
        shares[shares.index(min(shares))] += size
    return shares


def _with_known_words(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Let `formula` refuse a word that is not in its `Literal`, and say which ones are.

    Beside the formulas, not in them: the page's calculator translates those as they are written,
    and offers the words in lists.
    """
    hints = get_type_hints(formula)
    known = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}

    @functools.wraps(formula)
    def checked(**arguments: Any) -> Any:
        for name, words in known.items():
            if name in arguments and arguments[name] not in words:
                raise ValueError(f"{name} must be one of {list(words)}, got {arguments[name]!r}")
        return formula(**arguments)

    return checked


block_bytes = _with_known_words(block_bytes)
step_bytes = _with_known_words(step_bytes)
rank_bytes = _with_known_words(rank_bytes)
rank_step_bytes = _with_known_words(rank_step_bytes)


def peak_bytes(**sizes: int | str) -> int:
    """Return the most bytes that a step holds at once; the arguments are those of `step_bytes`."""
    return max(sum(parts.values()) for parts in step_bytes(**sizes).values())
