"""Operators on global tensors against the same on whole tensors: values and gradients, for every sbp of every input."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from shardwright.errors import LayoutError, PlanError
from shardwright.global_tensor import GlobalTensor, placement, sbp
from shardwright.global_tensor.geometry import GlobalLayout, boxes, terms
from shardwright.global_tensor.tensor import wrap

GRIDS = ([3, 1], [0, 2, 3], [2, 0, 1, 3], [[0, 1], [2, 3]])


@dataclass(frozen=True)
class Operator:
    """A function of whole tensors; an input of (low, high, *shape) is of whole numbers."""

    name: str
    function: Callable[..., object]
    inputs: tuple[object, ...]
    refuses: bool = False
    """Whether it may refuse some layouts; the others must take all."""


def integers(low: int, high: int, *shape: int) -> dict:
    return {"low": low, "high": high, "shape": shape}


def whole_of(given: object, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(given, dict):
        return torch.randint(given["low"], given["high"], given["shape"], generator=generator)
    return torch.randn(given, generator=generator, dtype=torch.float64)


def lying(world, whole: Tensor, where: GlobalLayout) -> GlobalTensor:
    """The whole, lying so; terms of a sum are of either sign, and far from what they add up to."""
    held = boxes(tuple(whole.shape), where).get(world.rank)
    if held is None:
        return wrap(whole.new_empty((0,) * max(whole.ndim, 1)), whole.shape, where)
    of_rank, num = terms(where), max(terms(where).values()) + 1
    local = whole
    if num > 1:
        generator = torch.Generator().manual_seed(5)
        if whole.dtype.is_floating_point:
            parts = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(num - 1)]
        else:
            parts = [torch.randint(-9, 9, whole.shape, generator=generator).to(whole.dtype) for _ in range(num - 1)]
        parts.append(whole - sum(parts))
        local = parts[of_rank[world.rank]]
    return wrap(local[held.slices].clone(), whole.shape, where)


def letters(whole: Tensor) -> list:
    terms_ = [sbp.partial_sum] if whole.dtype != torch.bool else []
    return [sbp.broadcast, *terms_, *map(sbp.split, range(whole.ndim))]


def combinations(wholes: Sequence[Tensor], num_axes: int, most: int, seed: int) -> list[tuple]:
    each = [list(product(letters(whole), repeat=num_axes)) for whole in wholes]
    rng = random.Random(seed)
    total = 1
    for one in each:
        total *= len(one)
    if total <= most:
        return list(product(*each))
    return [tuple(rng.choice(one) for one in each) for _ in range(most)]


def sweep(world, operator: Operator, most: int) -> tuple[int, list[str], list[str]]:
    """How many layouts were tried, which came out wrong, and which were refused."""
    wholes = [whole_of(given, seed) for seed, given in enumerate(operator.inputs)]
    tried, wrong, refused = 0, [], []
    for grid in GRIDS:
        where = placement("cpu", grid)
        for forms in combinations(wholes, where.ndim, most, seed=len(operator.name)):
            tried += 1
            case = f"{operator.name} {grid}: {[sbp.sbp_text(form) for form in forms]}"
            try:
                wrong += [f"{case}: {each}" for each in differences(world, operator, wholes, where, forms)]
            except (PlanError, LayoutError) as refusal:
                refused.append(f"{case}: {refusal}")
    return tried, wrong, refused


def differences(world, operator: Operator, wholes: Sequence[Tensor], where, forms: Sequence[tuple]) -> list[str]:
    """What differs from the same on one device: each output, and each input's gradient."""
    plain = [whole.clone().requires_grad_(whole.dtype.is_floating_point) for whole in wholes]
    parts = [
        lying(world, whole, GlobalLayout(where, form)).requires_grad_(whole.dtype.is_floating_point)
        for whole, form in zip(wholes, forms, strict=True)
    ]
    expected, found = outputs(operator.function(*plain)), outputs(operator.function(*parts))
    wrong = []
    if len(expected) != len(found):
        return [f"{len(found)} outputs and not {len(expected)}"]
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        wrong += unlike(f"output {number}", a.detach(), b.detach())
    backward = [number for number, a in enumerate(expected) if a.requires_grad]
    if not backward:
        return wrong
    weights = [whole_of(tuple(expected[number].shape), 90 + number) for number in backward]
    inputs = [number for number, x in enumerate(plain) if x.requires_grad]
    wanted = torch.autograd.grad(
        [expected[n] for n in backward], [plain[n] for n in inputs], weights, allow_unused=True
    )
    replicated = (sbp.broadcast,) * where.ndim
    given = [lying(world, weight, GlobalLayout(where, replicated)) for weight in weights]
    gradients = torch.autograd.grad([found[n] for n in backward], [parts[n] for n in inputs], given, allow_unused=True)
    for number, a, b in zip(inputs, wanted, gradients, strict=True):
        if a is not None:
            wrong += ["no gradient"] if b is None else unlike(f"gradient {number}", a, b)
    return wrong


def outputs(found: object) -> list[Tensor]:
    return [x for x in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(x, Tensor)]


def unlike(what: str, a: Tensor, b: Tensor) -> list[str]:
    if not isinstance(b, GlobalTensor):
        return [f"{what} is no global tensor"]
    whole = b.full_tensor()
    if whole.shape != a.shape or whole.dtype != a.dtype:
        return [f"{what} is {whole.dtype} {list(whole.shape)} and not {a.dtype} {list(a.shape)}, {sbp.sbp_text(b.sbp)}"]
    if not torch.allclose(whole.double(), a.double(), rtol=1e-10, atol=1e-10):
        return [f"{what} is off by {(whole.double() - a.double()).abs().max().item()}, {sbp.sbp_text(b.sbp)}"]
    return []


attend = F.scaled_dot_product_attention

HEADS = (2, 3, 5, 4)
X, Y = (5, 6), (6, 7)


def write_a_row(a: Tensor, b: Tensor) -> Tensor:
    a = a * 1
    a[2] = b
    return a


def write_a_chunk(a: Tensor) -> Tensor:
    a = a * 1
    a.narrow(0, 1, 2).zero_()
    a.flatten()[:4].zero_()
    return a


def write_a_number(a: Tensor) -> Tensor:
    a = a * 1
    a[1:3, 2] = 7.0
    a[0].relu_()
    return a


def evaluated(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.batch_norm(x, mean.detach(), variance.detach().abs() + 1, w, b, False)


def logits(x: Tensor, y: Tensor, w: Tensor, p: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, y.detach().sigmoid(), w.detach(), pos_weight=p.detach())


def write_by_list(x: Tensor) -> Tensor:
    x = x * 1
    x[[0, 2]] = 5.0
    return x


MORE = [
    Operator("list", lambda x: x[[0, -1, 0]], (X,)),
    Operator("list_last", lambda x: x[..., None, [4, 0]], ((3, 4, 5),)),
    Operator("list_of_truths", lambda x: x[:, [True, False, True, True, False]], ((3, 5),)),
    Operator("write_by_list", write_by_list, (X,)),
    Operator("one_hot", lambda i: F.one_hot(i, 7), (integers(0, 7, 5),)),
    Operator("binary_entropy", lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.detach().sigmoid()), (X, X)),
    Operator("binary_entropy_logits", logits, (X, X, (6,), (6,))),
    Operator("glu", lambda x: F.glu(x, 1), (X,)),
    Operator("prelu", F.prelu, ((3, 4, 5), (4,))),
    Operator("hardswish", F.hardswish, (X,)),
    Operator("log_sigmoid", F.logsigmoid, (X,)),
    Operator("softshrink", F.softshrink, (X,)),
    Operator("nearest", lambda x: F.interpolate(x, scale_factor=2), ((3, 4, 3, 2),)),
    Operator("bilinear", lambda x: F.interpolate(x, size=(4, 7), mode="bilinear"), ((3, 4, 6, 5),)),
    Operator("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), ((3, 4, 3, 2),)),
    Operator("windows", lambda x: F.unfold(x, 2), ((3, 2, 4, 3),)),
    Operator("pad_reflected", lambda x: F.pad(x, (1, 2), mode="reflect"), ((3, 4, 5),)),
    Operator("pad_around", lambda x: F.pad(x, (1, 2), mode="circular"), ((3, 4, 5),)),
    Operator("cumprod", lambda x: x.cumprod(0), (X,)),
    Operator("cummax", lambda x: x.cummax(0), (X,)),
    Operator("prod_backward", lambda x: x.prod(1), (X,)),
    Operator("nansum", torch.nansum, (X,)),
    Operator("index_add", lambda x, i, s: x.index_add(1, i, s), (X, integers(0, 6, 3), (5, 3))),
    Operator("index_fill", lambda x, i: x.index_fill(1, i, 2.0), (X, integers(0, 6, 3))),
    Operator("scatter_reduce", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), (X, integers(0, 6, 5, 3), (5, 3))),
    Operator("select_scatter", lambda x, s: x.select_scatter(s, 0, 1), (X, (6,))),
    Operator("slice_scatter", lambda x, s: x.slice_scatter(s, 0, 1, 3), (X, (2, 6))),
    Operator("diag_embed", torch.diag_embed, (X,)),
    Operator("rot90", torch.rot90, (X,)),
    Operator("cross", lambda a, b: torch.linalg.cross(a, b, dim=1), ((5, 3), (5, 3))),
    Operator("cross_broadcast", torch.linalg.cross, ((1, 4, 3), (5, 1, 3))),
    Operator("bucketize", lambda x, b: torch.bucketize(x, b.sort()[0]), (X, (4,))),
    Operator("complex", lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), ((5, 2),)),
    Operator("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5), ((3, 5), (2, 3, 4), (2, 4, 5))),
    Operator("addbmm", torch.addbmm, ((3, 5), (2, 3, 4), (2, 4, 5))),
    Operator("addmv", torch.addmv, ((5,), X, (6,))),
    Operator("addr", torch.addr, (X, (5,), (6,))),
    Operator("batch_norm_evaluated", evaluated, ((5, 4, 3), (4,), (4,), (4,), (4,))),
    Operator("convolution_3d", F.conv3d, ((2, 3, 3, 3, 2), (4, 3, 2, 2, 2), (4,))),
    Operator("attention_mask_learnt", lambda q, k, v, m: attend(q, k, v, m), (HEADS, HEADS, HEADS, (5, 5))),
]  # fmt: skip

OPERATORS = [
    Operator("matmul", torch.matmul, (X, Y)),
    Operator("matmul_batched", torch.matmul, ((3, 5, 6), (3, 6, 2))),
    Operator("matmul_broadcast", torch.matmul, ((3, 5, 6), (6, 2))),
    Operator("matrix_vector", torch.matmul, (X, (6,))),
    Operator("vector_matrix", torch.matmul, ((6,), Y)),
    Operator("vector_matrices", torch.matmul, ((6,), (3, 6, 2))),
    Operator("dot", torch.matmul, ((6,), (6,))),
    Operator("linear", F.linear, (X, (7, 6), (7,))),
    Operator("linear_3d", F.linear, ((2, 5, 6), (7, 6), (7,))),
    Operator("einsum", lambda a, b: torch.einsum("bti,oi->bot", a, b), ((2, 5, 6), (7, 6))),
    Operator("add", torch.add, (X, X)),
    Operator("add_broadcast", torch.add, (X, (6,))),
    Operator("add_number", lambda x: x + 1.5, (X,)),
    Operator("subtract_scaled", lambda a, b: torch.sub(a, b, alpha=2), (X, X)),
    Operator("multiply", torch.mul, (X, X)),
    Operator("multiply_number", lambda x: 3 * x, (X,)),
    Operator("square", lambda x: x * x, (X,)),
    Operator("divide", torch.div, (X, X)),
    Operator("one_over", lambda x: 1 / x, (X,)),
    Operator("divide_number", lambda x: x / 3, (X,)),
    Operator("relu", F.relu, (X,)),
    Operator("gelu", F.gelu, (X,)),
    Operator("silu", F.silu, (X,)),
    Operator("tanh", torch.tanh, (X,)),
    Operator("sigmoid", torch.sigmoid, (X,)),
    Operator("softplus", F.softplus, (X,)),
    Operator("leaky_relu", F.leaky_relu, (X,)),
    Operator("exp", torch.exp, (X,)),
    Operator("abs", torch.abs, (X,)),
    Operator("power", lambda x: x**2, (X,)),
    Operator("clamp", lambda x: x.clamp(-0.5, 0.5), (X,)),
    Operator("maximum", torch.maximum, (X, X)),
    Operator("where", lambda a, b: torch.where(a > 0, a, b), (X, X)),
    Operator("masked_fill", lambda x: x.masked_fill(x > 0, 2.0), (X,)),
    Operator("to_integer", lambda x: x.to(torch.int64), (X,)),
    Operator("to_bool", lambda x: x.bool(), (X,)),
    Operator("to_float32", lambda x: x.float().double(), (integers(-5, 5, 5, 6),)),
    Operator("integer_to_float", lambda x: x.double(), (integers(-5, 5, 5, 6),)),
    Operator("integer_divide", lambda x: x // 2, (integers(-5, 5, 5, 6),)),
    Operator("remainder", lambda x: x % 3, (integers(-5, 5, 5, 6),)),
    Operator("mean_half", lambda x: (x * 8192).half().mean().double(), (integers(0, 7, 8, 4),)),
    Operator("mse_half", lambda x: F.mse_loss((x * 32).half(), (x * 0).half()).double(), (integers(0, 7, 8, 4),)),
    Operator("compare", torch.gt, (X, X)),
    Operator("round", torch.round, (X,)),
    Operator("sum", torch.sum, (X,)),
    Operator("sum_dim", lambda x: x.sum(1), ((3, 5, 6),)),
    Operator("sum_kept", lambda x: x.sum((0, 2), keepdim=True), ((3, 5, 6),)),
    Operator("sum_integers", torch.sum, (integers(-5, 5, 5, 6),)),
    Operator("mean", torch.mean, (X,)),
    Operator("mean_dim", lambda x: x.mean((0, -1)), ((3, 5, 6),)),
    Operator("max", torch.max, (X,)),
    Operator("max_dim", lambda x: torch.max(x, 0), (X,)),
    Operator("amax", lambda x: x.amax(1), (X,)),
    Operator("amin_all", torch.min, (X,)),
    Operator("argmax", lambda x: x.argmax(1), (X,)),
    Operator("argmax_all", torch.argmax, (X,)),
    Operator("norm", torch.norm, (X,)),
    Operator("vector_norm", torch.linalg.vector_norm, (X,)),
    Operator("norm_1", lambda x: x.norm(p=1), (X,)),
    Operator("norm_dim", lambda x: x.norm(dim=0), (X,)),
    Operator("norm_infinite", lambda x: torch.linalg.vector_norm(x, float("inf")), (X,)),
    Operator("variance", lambda x: x.var(0), (X,)),
    Operator("deviation", torch.std, (X,)),
    Operator("prod", lambda x: x.detach().prod(0), (X,)),
    Operator("all", lambda x: (x > 0).all(), (X,)),
    Operator("any_dim", lambda x: (x > 0).any(1), (X,)),
    Operator("logsumexp", lambda x: x.logsumexp(1), (X,)),
    Operator("cumsum", lambda x: x.cumsum(0), (X,)),
    Operator("sort", lambda x: x.sort(1), (X,)),
    Operator("topk", lambda x: x.topk(2, 1), (X,)),
    Operator("softmax", lambda x: x.softmax(-1), ((3, 5, 6),)),
    Operator("log_softmax", lambda x: x.log_softmax(1), ((3, 5, 6),)),
    Operator("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), ((3, 5, 6), (6,), (6,))),
    Operator("layer_norm_plain", lambda x: F.layer_norm(x, (5, 6)), ((3, 5, 6),)),
    Operator("rms_norm", lambda x, w: F.rms_norm(x, (6,), w), ((3, 5, 6), (6,))),
    Operator("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), ((5, 4, 3), (4,), (4,))),
    Operator("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((5, 4, 3), (4,), (4,)), True),
    Operator("embedding", F.embedding, (integers(0, 7, 3, 5), (7, 6))),
    Operator("embedding_padded", lambda i, w: F.embedding(i, w, padding_idx=2), (integers(0, 7, 3, 5), (7, 6))),
    Operator("cross_entropy", F.cross_entropy, (X, integers(0, 6, 5))),
    Operator("cross_entropy_sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), (X, integers(0, 6, 5))),
    Operator("cross_entropy_none", lambda x, t: F.cross_entropy(x, t, reduction="none"), (X, integers(0, 6, 5))),
    Operator("cross_entropy_ignored", lambda x, t: F.cross_entropy(x, t, ignore_index=2), (X, integers(0, 6, 5))),
    Operator("cross_entropy_smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (X, integers(0, 6, 5))),
    Operator("cross_entropy_2d", F.cross_entropy, ((3, 4, 5), integers(0, 4, 3, 5))),
    Operator("cross_entropy_weighted", lambda x, t, w: F.cross_entropy(x, t, w.detach()), (X, integers(0, 6, 5), (6,))),
    Operator("mse", F.mse_loss, (X, X)),
    Operator("mse_none", lambda a, b: F.mse_loss(a, b, reduction="none"), (X, X)),
    Operator("smooth_l1", F.smooth_l1_loss, (X, X)),
    Operator("convolution", lambda x, w, b: F.conv2d(x, w, b, padding=1), ((3, 4, 5, 5), (6, 4, 3, 3), (6,))),
    Operator("convolution_strided", lambda x, w: F.conv2d(x, w, stride=2), ((3, 4, 6, 5), (6, 4, 2, 2))),
    Operator("convolution_grouped", lambda x, w: F.conv2d(x, w, padding=1, groups=2), ((3, 4, 5, 5), (6, 2, 3, 3))),
    Operator("convolution_1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), ((3, 4, 5), (6, 4, 3), (6,))),
    Operator("convolution_transposed", lambda x, w: F.conv_transpose2d(x, w, stride=2), ((3, 4, 3, 3), (4, 6, 2, 2))),
    Operator("max_pool", lambda x: F.max_pool2d(x, 2), ((3, 4, 6, 5),)),
    Operator("avg_pool", lambda x: F.avg_pool2d(x, 2), ((3, 4, 6, 5),)),
    Operator("adaptive_pool", lambda x: F.adaptive_avg_pool2d(x, 1), ((3, 4, 6, 5),)),
    Operator("attention", attend, (HEADS,) * 3),
    Operator("attention_causal", lambda q, k, v: attend(q, k, v, is_causal=True), (HEADS,) * 3),
    Operator("attention_masked", lambda q, k, v, m: attend(q, k, v, m.detach()), (HEADS, HEADS, HEADS, (5, 5))),
    Operator("attention_causal_3d", lambda q, k, v: attend(q, k, v, is_causal=True), ((3, 5, 4),) * 3),
    Operator("reshape", lambda x: x.reshape(3, 20), ((3, 4, 5),)),
    Operator("flatten", lambda x: x.flatten(), ((6, 4),)),
    Operator("flatten_start", lambda x: x.flatten(0, 1), ((3, 4, 5),)),
    Operator("unflatten", lambda x: x.view(2, 4, 6), ((8, 6),)),
    Operator("unflatten_last", lambda x: x.view(3, 4, 2), ((3, 8),)),
    Operator("view_heads", lambda x: x.view(2, 3, 4, 2).transpose(1, 2), ((2, 3, 8),)),
    Operator("merge_heads", lambda x: x.transpose(1, 2).reshape(2, 3, 8), ((2, 4, 3, 2),)),
    Operator("transpose", lambda x: x.transpose(0, 2), ((3, 4, 5),)),
    Operator("permute", lambda x: x.permute(2, 0, 1), ((3, 4, 5),)),
    Operator("t", lambda x: x.t(), (X,)),
    Operator("squeeze", lambda x: x.squeeze(), ((3, 1, 5),)),
    Operator("squeeze_dim", lambda x: x.squeeze(0), ((1, 5),)),
    Operator("unsqueeze", lambda x: x.unsqueeze(1), (X,)),
    Operator("expand", lambda x: x.expand(4, 5, 6), ((5, 6),)),
    Operator("expand_one", lambda x: x.expand(5, 6), ((5, 1),)),
    Operator("repeat", lambda x: x.repeat(2, 1), (X,)),
    Operator("slice", lambda x: x[1:4], (X,)),
    Operator("slice_last", lambda x: x[:, ::2], (X,)),
    Operator("select", lambda x: x[2], ((3, 4, 5),)),
    Operator("negative_select", lambda x: x[:, -1], ((3, 4, 5),)),
    Operator("index", lambda x, i: x[i], (X, integers(0, 5, 4))),
    Operator("index_second", lambda x, i: x[:, i], ((3, 5, 2), integers(0, 5, 4))),
    Operator("index_pairs", lambda x, i, j: x[i, j], (X, integers(0, 5, 4), integers(0, 6, 4))),
    Operator("index_apart", lambda x, i, j: x[i, :, j], ((3, 4, 5), integers(0, 3, 2), integers(0, 5, 2))),
    Operator("index_select", lambda x, i: x.index_select(1, i), (X, integers(0, 6, 4))),
    Operator("gather", lambda x, i: x.gather(1, i), (X, integers(0, 6, 5, 3))),
    Operator("scatter_add", lambda x, i, s: x.scatter_add(1, i, s), (X, integers(0, 6, 5, 3), (5, 3))),
    Operator("cat", lambda a, b: torch.cat((a, b), 1), (X, (5, 3))),
    Operator("stack", lambda a, b: torch.stack((a, b), 1), (X, X)),
    Operator("chunk", lambda x: x.chunk(3, 1), (X,)),
    Operator("split", lambda x: x.split((2, 3), 0), (X,)),
    Operator("unbind", lambda x: x.unbind(1), ((4, 3),)),
    Operator("flip", lambda x: x.flip(0), (X,)),
    Operator("roll", lambda x: x.roll(1, 0), (X,)),
    Operator("roll_flat", lambda x: x.roll(2), (X,)),
    Operator("tril", torch.tril, (X,)),
    Operator("pad", lambda x: F.pad(x, (1, 2)), (X,)),
    Operator("pad_value", lambda x: F.pad(x, (1, 2), value=3.0), (X,)),
    Operator("diagonal", lambda x: x.diagonal(0, 1, 2), ((3, 4, 4),)),
    Operator("unfold", lambda x: x.unfold(1, 2, 2), (X,), True),
    Operator("outer", torch.outer, ((5,), (6,))),
    Operator("clone", torch.clone, (X,)),
    Operator("zeros_like", torch.zeros_like, (X,)),
    Operator("ones_like", torch.ones_like, (X,)),
    Operator("lerp", lambda a, b: torch.lerp(a, b, 0.3), (X, X)),
    Operator("addcmul", torch.addcmul, (X, X, X)),
    Operator("add_in_place", lambda a, b: (a * 1).add_(b), (X, X)),
    Operator("multiply_in_place", lambda a, b: (a * 1).mul_(b), (X, X)),
    Operator("relu_in_place", lambda a: F.relu(a * 1, inplace=True), (X,)),
    Operator("copy", lambda a, b: (a * 1).copy_(b), (X, X)),
    Operator("write_a_row", write_a_row, (X, (6,)), True),
    Operator("write_a_chunk", write_a_chunk, (X,), True),
    Operator("write_a_number", write_a_number, (X,), True),
    Operator("accumulate", lambda a, i, b: (a * 1).index_put_((i,), b, accumulate=True), (X, integers(0, 5, 5), X)),
    Operator("scatter", lambda a, i: (a * 1).scatter_(1, i, 2.0), (X, integers(0, 6, 5, 1))),
    Operator("inverse", torch.linalg.inv, ((4, 4),), True),
    Operator("cholesky", lambda x: torch.linalg.cholesky(x @ x.mT), ((4, 4),), True),
    Operator("bmm_uneven", torch.bmm, ((5, 3, 7), (5, 7, 2))),
    *MORE,
    Operator("swiglu", lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b), (X, (7, 6), (7, 6))),
]  # fmt: skip
