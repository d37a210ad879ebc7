"""What torch's own functions do with a QTensor: F.linear goes straight to one bitport op, before any dispatch."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from bitport.errors import ArgumentError
from bitport.numerics import ACTIVATIONS, FLOATS, STATIC, Format, Quantized, dequantize, fake_quantize, quantize
from bitport.ops import select
from bitport.ops.bags import embedding_bag
from bitport.ops.convert import format_json, from_list
from bitport.ops.flops import tell_counters
from bitport.ops.linear import check_dense, check_linear
from bitport.ops.linear_then import follow
from bitport.ops.outside import OUTSIDE
from bitport.ops.table import OPS, has_tangent, no_view, refuse_tangents
from bitport.ops.weight import Weight
from bitport.tensor import ATEN, FUNCTIONS, QTensor
from bitport.tensor.aten import take_experts
from bitport.tensor.exporting import recorded
from bitport.tensor.qtensor import KEPT

aten = torch.ops.aten
_dispatch_modes, _functorch = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_any_autocast, _jit_tracer = torch._C._is_any_autocast_enabled, torch._C._get_tracing_state


def operand(q: QTensor) -> Weight:
    """Made as a plain tuple: naming the fields takes as long as finding them."""
    return tuple.__new__(Weight, (q.qdata, q.scale, q.zero, q.scale2, *q.matrix, q.bits_layout))


def _kept_operand(q: QTensor) -> Weight:
    """The same, found once: a QTensor whose parts are replaced forgets it."""
    kept = q.__dict__.get(KEPT)
    if kept is None:
        kept = q.__dict__[KEPT] = operand(q)
    return kept


@functools.cache
def _type(device: torch.device) -> str:
    """Making the text takes twice as long as finding it."""
    return device.type


def run(op: str, x: Tensor, *args: Any) -> Any:
    """Call an op for a QTensor, with the kernel that is forced, if one is: by PyTorch's dispatcher, where gradients and
    wrappers are, if that leads to the chooser, which knows it too; a device's own kernel there does not."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.bitport, op).default(x, *args)
    if _dispatch_modes():
        tell_counters()
    kernel = select.forced(op)
    if kernel is not None and select.is_chooser(op, _type(x.device)):
        select.named(kernel, op, x, *args)  # tensors without numbers do not come as far as the chooser
        kernel = None
    return select.call(op, x, *args, kernel=kernel)


def linear(input: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """F.linear with a quantized weight: the input is prepared as the weight asks, then one op."""
    if isinstance(input, QTensor) or not isinstance(weight, QTensor):
        raise ArgumentError("F.linear takes a quantized tensor as its weight only; dequantize() the input")
    if not weight.is_rows:
        turned = weight.transposed and weight.dim() == 2
        seen = "is a transposed view [K, N]: pass weight.t()" if turned else f"has shape {[*weight.shape]}"
        raise ArgumentError(f"F.linear wants a weight [N, K]; this QTensor {seen}")
    return product(input, weight, bias)


def product(x: Tensor, q: QTensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K] times the matrix [N, K] behind q, plus bias.

    Where nothing is traced PyTorch's dispatcher would only come to the device's kernel, through the keys for gradients
    and transforms and with a weight checked that was checked when it was made: the kernel is called at once.
    """
    if (_functorch() is not None or forward_ad._current_level >= 0) and _differentiates(x, bias):
        return _product_of_floats(x, q, bias)
    x = prepare(x, q)
    act = q.scheme.act
    op, rest = ("dyn_linear", (act, _act_scale(q), bias)) if act else ("linear", (bias,))
    if not torch.compiler.is_compiling() and _is_plain(x) and (bias is None or _has_values(bias)):
        device = _type(x.device)
        kernel = select.DIRECT.get((op, device, q.bits_layout))
        if kernel is None and select.is_chooser(op, device):
            check_linear(x, q.qdata, q.matrix.n, q.matrix.k, bias)
            kernel = select.CHOOSERS[op]
        if kernel is not None:
            if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
                return _differentiated(x, bias, kernel, op, _kept_operand(q), rest[:-1])
            return kernel(x, *_kept_operand(q), *rest)
    return run(op, x, *operand(q), *rest)


def _act_scale(q: QTensor) -> Tensor | None:
    """The fixed scale of the input; None where it is measured on every call."""
    if q.scheme.static and q.act_scale is None:
        raise ArgumentError(
            f"{q.scheme} has a static input scale, but none was calibrated: quantize_(.., calibrate=batches)"
        )
    return q.act_scale


def linear_then(input: Tensor, weight: Tensor, bias: Tensor | None, then: str, times: Tensor | None = None) -> Tensor:
    """``f(F.linear(input, weight, bias)) * times``, f of FOLLOWING, as one op where the weight is quantized and nothing
    is differentiated; otherwise as what it is made of."""
    transformed = not torch.compiler.is_compiling() and (_functorch() is not None or has_tangent(input, bias, times))
    if not isinstance(weight, QTensor) or not weight.is_rows or transformed:
        return follow(F.linear(input, weight, bias), then, times)
    x = prepare(input, weight)
    unlike = times is not None and (times.dtype != x.dtype or times.shape != (*x.shape[:-1], weight.matrix.n))
    learned = any(tensor is not None and tensor.requires_grad for tensor in (input, bias, times))
    if unlike or (learned and torch.is_grad_enabled()):
        return follow(F.linear(input, weight, bias), then, times)
    act = weight.scheme.act
    op, rest = ("dyn_linear_then", (act, _act_scale(weight), bias)) if act else ("linear_then", (bias,))
    plain = not torch.compiler.is_compiling() and _is_plain(x)
    if plain and all(each is None or _has_values(each) for each in (bias, times)):
        kernel = select.DIRECT.get((op, _type(x.device), weight.bits_layout))
        if kernel is not None:
            return kernel(x, *_kept_operand(weight), *rest, then, times)
    return run(op, x, *operand(weight), *rest, then, times)


def _differentiates(*tensors: Tensor | None) -> bool:
    """Whether torch.func.grad, jvp or one of their kin is at work, or forward-mode AD on ``tensors``, which know no
    gradient of our ops. Dynamo, which cannot read on, answers no."""
    if torch.compiler.is_dynamo_compiling():
        return False
    kinds = (TransformType.Grad, TransformType.Jvp)
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() in kinds for level in levels) or has_tangent(*tensors)


def _product_of_floats(x: Tensor, q: QTensor, bias: Tensor | None) -> Tensor:
    if q.scheme.act:
        raise ArgumentError(
            f"torch.func cannot differentiate {q.scheme}, which rounds its input, nor can forward-mode AD; "
            f"use autograd (backward())"
        )
    rows = q.replace(shape=(q.matrix.n, q.matrix.k), transposed=False)
    return F.linear(x, rows.dequantize(x.dtype), bias)


class _Product(torch.autograd.Function):
    """The gradient that the op has at PyTorch's dispatcher, for a tenth of the cost (5 us, not 50). Of x nothing is
    kept: the gradient of a product with a constant does not depend on it. ``rounding``: what the op takes between the
    weight and the bias, (act, act_scale) where it rounds inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        kernel: Callable[..., Tensor],
        op: str,
        weight: Weight,
        rounding: tuple[Any, ...],
    ) -> Tensor:
        ctx.op, ctx.weight, ctx.bias_dtype = op, weight, None if bias is None else bias.dtype
        return no_view(kernel(x, *weight, *rounding, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wants_x, wants_bias = ctx.needs_input_grad[:2]
        grad_x = OPS[ctx.op].backward(grad, None, *ctx.weight) if wants_x else None  # type: ignore[misc]
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype) if wants_bias else None
        return grad_x, grad_bias, None, None, None, None


_differentiated = super(torch.autograd.Function, _Product).apply
"""_Product.apply without its wrapper for function transforms (3 us): _is_plain has ruled them out."""


def _is_plain(x: Tensor) -> bool:
    """An ordinary tensor, seen by no dispatch mode, function transform or torch.jit.trace, whose memory holds its
    values."""
    seen = _dispatch_modes() or _functorch() is not None or _jit_tracer() is not None
    return type(x) is Tensor and not seen and not x.is_neg()


_OWN_MEMORY = (Tensor, torch.nn.Parameter)


def _has_values(part: Tensor) -> bool:
    """Whether a kernel finds in the memory of ``part`` what it stands for. A DTensor's address is 0, as if there were
    none."""
    return type(part) in _OWN_MEMORY and not part.is_neg()


def _autocasts(x: Tensor) -> bool:
    return _any_autocast() and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def autocasted(x: Tensor) -> Tensor:
    """The input of a product in the dtype of autocast, where that is on. float64 and what is no float it leaves."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if _autocasts(x) and x.dtype in FLOATS else x


def prepare(x: Tensor, q: QTensor) -> Tensor:
    """Autocast, then the pre-scale (AWQ, SmoothQuant), then the order of columns (act-order)."""
    return in_code_order(autocasted(x), q)


def in_code_order(x: Tensor, q: QTensor) -> Tensor:
    """Rows of the input, or of what belongs to the value, as they meet the codes."""
    if q.pre_scale is not None:
        x = x * q.pre_scale.to(x.dtype)
    if q.perm is not None:
        x = x.gather(-1, q.perm.long().expand(x.shape))  # on a CPU several times as fast as index_select
    return x


def embedding(
    input: Tensor,
    weight: QTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None:
        raise ArgumentError("max_norm rewrites the table on every lookup; a quantized one cannot be rewritten")
    if weight.transposed:
        raise ArgumentError(
            "this QTensor is a transposed view [K, N]; F.embedding wants a table [N, K]: pass weight.t()"
        )
    if input.layout == torch.jagged:
        ids: Any = input
        places = {"offsets": ids.offsets(), "lengths": ids.lengths(), "jagged_dim": ids._ragged_idx}
        return torch.nested.nested_tensor_from_jagged(embedding(ids.values(), weight), **places)
    check_dense("the tensor of ids", input)
    return weight.in_value_order(run("embedding", input, *operand(weight), _dtype(weight)))


def getitem(q: QTensor, index: Any) -> Tensor:
    """table[ids] is a lookup, where negative ids count from the end; anything else slices or selects."""
    if isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and index.dim() > 0 and q.dim() == 2:
        return embedding(torch.where(index < 0, index + q.matrix.n, index), q)
    with torch._C.DisableTorchFunctionSubclass():
        made = Tensor.__getitem__(q, index)
    return recorded(made, QTensor)


def _index(func: Any, q: QTensor, indices: Sequence[Tensor | None]) -> Tensor:
    """A lookup in a table by a list or a mask, or some of the experts of a stack."""
    if q.dim() != 2 or q.transposed or len(indices) != 1:
        return take_experts(func, q, indices)
    return embedding(func(torch.arange(q.matrix.n, device=q.qdata.device), indices), q)


def dense(q: QTensor, dtype: torch.dtype) -> Tensor:
    """The weight for a product of PyTorch's, by the kernel of its device; while a program is compiled in torch's ops,
    which a compiler joins with what is around them."""
    if torch.compiler.is_compiling():
        return q.dequantize(dtype)
    return q.shaped(q.in_value_order(run("dequantize", *operand(q), dtype)))


def _dtype(q: QTensor) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        return q.dtype


def _convolution(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A convolution with a quantized weight: dequantized to the input's dtype, then torch's own."""

    def conv(input: Tensor, weight: QTensor, *args: Any, **kwargs: Any) -> Tensor:
        return fn(input, dense(weight, input.dtype), *args, **kwargs)

    return conv


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """x [.., K] @ q where q is the transposed view [K, N] of a weight, or [E, K, N] of experts."""
    if isinstance(input, QTensor) and not isinstance(other, QTensor):
        return matmul(other, input.mT) if other.dim() == 1 else matmul(other.mT, input.mT).mT
    x, q = input, other
    if isinstance(x, QTensor) or not isinstance(q, QTensor):
        raise ArgumentError("a product takes one quantized factor; dequantize() the other")
    if not q.transposed:
        return x @ dense(q, x.dtype)
    if q.repeated:
        y, batch = product(x, q), torch.broadcast_shapes(x.shape[:-2], q.shape[:-2])
        return y.expand(*batch, *y.shape[-2:]).contiguous()
    if not q.batched:
        return product(x, q)
    if _has_few_for_each(x, q):
        return _few_for_each(x, q)
    if not q.scheme.act:
        return x @ dense(q, x.dtype)
    if (torch.is_grad_enabled() and x.requires_grad) or _differentiates(x):
        raise ArgumentError(
            f"a batched product with {q.scheme}, which rounds its input, has no derivative; F.grouped_mm has that of "
            f"backward()"
        )
    x = prepare(x, q)
    rounded = _rounded(x, q.scheme.act, _act_scale(q))
    codes = q.replace(perm=None, pre_scale=None)
    # autocast would round both factors once more
    with torch.autocast(x.device.type, enabled=False) if _autocasts(x) else contextlib.nullcontext():
        return (rounded @ dense(codes, torch.float32)).to(x.dtype)


FEW_ROWS = 64
"""For each expert. A product of so few takes about as long as to read the weight, and packed that is less."""


def _has_few_for_each(x: Tensor, q: QTensor) -> bool:
    """Whether a batched product is to be one of packed weights: in eager mode, without a gradient, on a device with a
    kernel for that. The generic one looks at data, and dequantizes all of them like bmm."""
    if torch.compiler.is_compiling() or _functorch() is not None or _autocasts(x) or x.dtype not in FLOATS:
        return False
    act, fixed = q.scheme.act, q.act_scale is not None
    if act in STATIC and not fixed:  # one scale for all of x: kernels for experts take theirs by rows
        return False
    if not select.IMPLS.get(("dyn_grouped_linear" if act and not fixed else "grouped_linear", _type(x.device))):
        return False
    alike = x.dim() == q.dim() == 3 and x.shape[0] == q.shape[0] and 0 < x.shape[1] <= FEW_ROWS
    return alike and not (torch.is_grad_enabled() and x.requires_grad) and not has_tangent(x)


def _few_for_each(x: Tensor, q: QTensor) -> Tensor:
    """x [E, M, K] as rows of experts, M for each."""
    experts, count, _ = x.shape
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=x.device) * count
    y = grouped(prepare(x, q).flatten(0, 1), ends, operand(q), q.scheme.act, _act_scale(q))
    return y.unflatten(0, (experts, count))


def _with_rank(name: str, rank: int) -> Callable[..., Tensor]:
    def product_of_rank(input: Tensor, mat2: Tensor) -> Tensor:
        if input.dim() != rank or mat2.dim() != rank:
            raise ArgumentError(f"{name} takes two {rank}-D tensors, not {[*input.shape]} and {[*mat2.shape]}")
        if input.shape[:-2] != mat2.shape[:-2]:
            raise ArgumentError(f"{name} takes as many matrices on both sides, not {[*input.shape]}, {[*mat2.shape]}")
        return matmul(input, mat2)

    product_of_rank.__qualname__ = name  # in what Python says of arguments that it does not take
    return product_of_rank


mm, bmm = _with_rank("mm", 2), _with_rank("bmm", 3)


def mv(input: Tensor, vec: Tensor) -> Tensor:
    if input.dim() != 2 or vec.dim() != 1:
        raise ArgumentError(f"mv takes a matrix and a vector, not {[*input.shape]} and {[*vec.shape]}")
    return matmul(input, vec)


def _added_to(product: Callable[..., Tensor], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def sum_of(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if isinstance(input, QTensor) and not isinstance(mat1, QTensor) and not isinstance(mat2, QTensor):
            return function(input.dequantize(), mat1, mat2, beta=beta, alpha=alpha)  # what PEFT adds to experts
        y, other = product(mat1, mat2), autocasted(input)
        total = added(y, other, beta, alpha)
        if other.dtype != y.dtype or total.shape != y.shape:
            raise ArgumentError(
                f"{function.__name__} adds to a product {y.dtype} {[*y.shape]} what has its dtype and a shape that "
                f"broadcasts to it, not {other.dtype} {[*other.shape]}"
            )
        return total

    sum_of.__qualname__ = function.__name__
    return sum_of


addmm, baddbmm = _added_to(mm, torch.addmm), _added_to(bmm, torch.baddbmm)


def added(y: Tensor, input: Tensor, beta: float, alpha: float) -> Tensor:
    """alpha y + beta input; what is in ``input`` does not count where beta is 0, be it NaN."""
    y = y if alpha == 1 else y * alpha
    if beta == 0:
        return y
    return y + (input if beta == 1 else input * beta)


def einsum(equation: str, *operands: Any) -> Tensor:
    """torch's own, which makes of some equations a batched product."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.einsum(equation, *operands)
    except ArgumentError as error:
        raise ArgumentError(
            f"torch.einsum does not take a quantized weight in {equation!r}: use F.linear(x, weight), "
            f"x @ weight.mT or weight.dequantize()"
        ) from error


def grouped_mm(
    mat_a: Tensor, mat_b: QTensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """F.grouped_mm(x [T, K], q [E, K, N], offs): the transposed view of expert weights [E, N, K]."""
    x, q = mat_a, mat_b
    if offs is None or bias is not None or not isinstance(q, QTensor) or isinstance(x, QTensor):
        raise ArgumentError("a quantized grouped product takes (x, experts, offs=...), experts quantized and no bias")
    if not q.transposed:
        return F.grouped_mm(x, dense(q, x.dtype), offs=offs, out_dtype=out_dtype)
    y = grouped(prepare(x, q), offs, operand(q), q.scheme.act, _act_scale(q))
    return y if out_dtype is None else y.to(out_dtype)


def grouped(x: Tensor, offs: Tensor, weight: Weight, act: str, act_scale: Tensor | None) -> Tensor:
    """The op of rounded inputs measures their scales; where one is fixed, they are rounded before the product."""
    if act and act_scale is not None:
        refuse_tangents(OPS["dyn_grouped_linear"], x)
        rounded = _rounded(x, act, act_scale)
        if x.requires_grad:
            rounded = rounded + (x - x.detach())  # zero, through which the gradient passes
        return run("grouped_linear", rounded, offs, *weight).to(x.dtype)
    return run("dyn_grouped_linear", x, offs, *weight, act) if act else run("grouped_linear", x, offs, *weight)


def quantize_weight(value: Tensor, fmt: Format) -> Quantized:
    """numerics.quantize by the kernel of the value's device."""
    return from_list(run("quantize", value, format_json(fmt)))


def dequantize_weight(parts: Quantized, fmt: Format, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """numerics.dequantize, in torch's ops; by the kernel of a device that those are none of."""
    if parts.data.device.type not in OUTSIDE:
        return dequantize(parts, fmt, n, k, dtype)
    return run("dequantize", *parts, fmt.dtype, n, k, *fmt.block_shape(n, k), "plain", dtype)


def _rounded(x: Tensor, act: str, act_scale: Tensor | None) -> Tensor:
    """numerics.fake_quantize, likewise."""
    if x.device.type not in OUTSIDE:
        return fake_quantize(x, act, act_scale)
    m, k = math.prod(x.shape[:-1]), x.shape[-1]
    parts = from_list(run("quantize_input", x, act, act_scale))
    return dequantize_weight(parts, ACTIVATIONS[act], m, k, torch.float32).reshape(x.shape)


TRACED_GROUPED_MM = "transformers::grouped_mm_fallback"
"""What transformers has in the place of F.grouped_mm where a compiler traces another dtype than bfloat16."""
FUNCTIONS.update(
    {
        quantize: quantize_weight,
        dequantize: dequantize_weight,
        F.linear: linear,
        F.embedding: embedding,
        F.embedding_bag: embedding_bag,
        Tensor.__getitem__: getitem,
        torch.matmul: matmul,
        torch.mm: mm,
        torch.bmm: bmm,
        Tensor.matmul: matmul,
        Tensor.__matmul__: matmul,
        Tensor.mm: mm,
        Tensor.bmm: bmm,
        torch.einsum: einsum,
        torch.mv: mv,
        Tensor.mv: mv,
        torch.addmm: addmm,
        torch.baddbmm: baddbmm,
        F.grouped_mm: grouped_mm,
        torch._grouped_mm: grouped_mm,
        TRACED_GROUPED_MM: grouped_mm,
    }
)


CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
"""Of torch; those of F are the same functions."""
FUNCTIONS.update({fn: _convolution(fn) for fn in (getattr(torch, name) for name in CONVOLUTIONS)})


def _aten(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda func, *args, **kwargs: fn(*args, **kwargs)


ATEN.update(
    {
        aten.mm.default: _aten(mm),
        aten.bmm.default: _aten(bmm),
        aten.addmm.default: _aten(addmm),
        aten.baddbmm.default: _aten(baddbmm),
        aten._grouped_mm.default: _aten(grouped_mm),
        aten.index.Tensor: _index,
        aten.linear.default: _aten(linear),
        aten.embedding.default: _aten(lambda weight, ids, *rest: embedding(ids, weight)),
        aten.convolution.default: lambda func, x, weight, *rest: func(x, weight.dequantize(x.dtype), *rest),
    }
)
