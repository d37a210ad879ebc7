"""QTensor: a quantized matrix in place of a float tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from bitport import layouts
from bitport.errors import ArgumentError, UnsupportedError
from bitport.layouts import Matrix
from bitport.numerics import FLOATS, Format, Quantized, dequantize, quantize
from bitport.schemes import KINDS, Scheme
from bitport.schemes.presets import scheme_of
from bitport.tensor.cache_key import source_key
from bitport.tensor.dispatch import function_for, handled, not_compiled_alone
from bitport.tensor.exporting import recorded
from bitport.tensor.parts import (
    check_dense,
    check_extra,
    check_packed,
    check_parts,
    check_zero,
    matrix_of,
    rows_and_columns,
)

EXTRA = ("perm", "pre_scale", "act_scale")
PARTS = ("qdata", "scale", "zero", "scale2", *EXTRA)
KEPT = "_operand"
"""Attribute in which bitport.ops caches the parts as an operand of ops."""

INSTEAD = (
    ": take the float tensor with .dequantize(), leave that weight as it is (a rule 'skip'), or make the model a float "
    "one again, bitport.dequantize_(model), as before adapters are merged"
)

FUNCTIONS: dict[Callable[..., Any] | str, Callable[..., Any]] = {}
"""Handlers of torch functions that accept a QTensor, e.g. F.linear, and the kernels of our own ``quantize`` and
``dequantize``; filled by bitport.ops."""

ATEN: dict[Any, Callable[..., Any]] = {}
"""Handlers of aten ops that store, move and slice a QTensor; filled by bitport.tensor.aten."""


class QTensor(Tensor):
    """A quantized matrix that stands where a float tensor stood, usually as a module's parameter. It looks like that
    tensor (shape, dtype, device) and holds its parts::

        qdata   codes, packed as its layout says        scale, zero, scale2   as its scheme says
        perm       order of the columns of K in qdata (GPTQ act-order), or None
        pre_scale  what the input is multiplied by before the product (AWQ, SmoothQuant), or None
        act_scale  the fixed scale of a static activation, or None

    Its value is ``dequantize()``; the input is permuted and pre-scaled, not the value. ``dtype`` is only what that
    returns by default: casting a QTensor never changes the stored numbers. The matrix is [..., N, K] with blocks
    along K; a convolution's weight is [first, rest] flattened; ``transposed``: this tensor is the view [..., K, N] of
    it."""

    qdata: Tensor
    scale: Tensor
    zero: Tensor | None
    scale2: Tensor | None
    perm: Tensor | None
    pre_scale: Tensor | None
    act_scale: Tensor | None
    scheme: Scheme
    bits_layout: str
    matrix: Matrix
    transposed: bool
    repeated: bool
    """Whether leading dimensions are an expand() of a single matrix, without copies."""
    is_rows: bool
    """Whether this is a matrix [N, K], as F.linear requires. Cached: the shape takes as long as finding a kernel."""
    piece_of_packed: bool = False
    """Sliced from a packed tensor, so that it is a copy: writes into it would not reach that tensor."""
    received: bool = False
    """Filled by a collective, whose caller slices off the padding and keeps only the rest."""
    pieces: tuple[QTensor, ...] = ()
    """The pieces of all processes, if this tensor was gathered from them (bitport.tensor.collectives)."""
    room: int = 0
    """For one of several pieces: the largest row count, to which all are padded for sending (bitport.tensor.fsdp)."""
    fsdp_pre_all_gather: Callable[..., Any]
    fsdp_post_all_gather: Callable[..., Any]

    @staticmethod
    def __new__(
        cls,
        parts: Quantized,
        scheme: Scheme,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        matrix: Matrix,
        bits_layout: str = "plain",
        transposed: bool = False,
        repeated: bool = False,
        perm: Tensor | None = None,
        pre_scale: Tensor | None = None,
        act_scale: Tensor | None = None,
    ) -> QTensor:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts.data.device, requires_grad=False)
        self.__dict__.update(zip(PARTS, (*parts, perm, pre_scale, act_scale), strict=True))
        self.__dict__.update(scheme=scheme, bits_layout=bits_layout, matrix=matrix, transposed=transposed)
        self.__dict__.update(repeated=repeated and len(shape) > 2, is_rows=len(shape) == 2 and not transposed)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in PARTS:
            self.__dict__.pop(KEPT, None)

    # -- the value -----------------------------------------------------------------------------------------------

    @property
    def parts(self) -> Quantized:
        """Codes, scales and zero points in ``bits_layout``; :meth:`plain` gives the canonical ones."""
        return Quantized(self.qdata, self.scale, self.zero, self.scale2)

    @property
    def batched(self) -> bool:
        """Whether leading dimensions are a batch of matrices (experts)."""
        return self.qdata.dim() > layouts.layout(self.bits_layout).data_ndim

    def plain(self) -> Quantized:
        """The parts in the canonical layout."""
        return layouts.repack(self.matrix, self.parts, self.bits_layout, "plain")

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The value as a float tensor of the same shape, in ``dtype`` (default: its own)."""
        with torch._C.DisableTorchFunctionSubclass():
            own = self.dtype
        dtype = dtype or own
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ArgumentError(f"a quantized tensor stands for a float tensor, not for {dtype}")
        return self.shaped(self.in_value_order(FUNCTIONS[dequantize](self, dtype)))

    def in_value_order(self, rows: Tensor) -> Tensor:
        """Convert rows in code order to rows of the value by undoing perm and pre_scale."""
        if self.perm is not None:
            rows = torch.zeros_like(rows).index_copy(-1, self.perm.long(), rows)  # ExecuTorch has no empty_like
        return rows if self.pre_scale is None else rows * self.pre_scale.to(rows.dtype)

    def shaped(self, value: Tensor) -> Tensor:
        """View the matrix [..., N, K] in the shape of this tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            shape = tuple(self.shape)
        value = value.transpose(-1, -2) if self.transposed else value
        return value.expand(shape) if self.transposed or self.repeated else value.reshape(shape)

    # -- other forms of the same value ---------------------------------------------------------------------------

    def replace(self, parts: Quantized | None = None, **changes: Any) -> QTensor:
        """This tensor with other parts or metadata; the rest is shared."""
        with torch._C.DisableTorchFunctionSubclass():
            fields = {"shape": tuple(self.shape), "dtype": self.dtype}
        for name in ("matrix", "bits_layout", "transposed", "repeated", *EXTRA):
            fields[name] = getattr(self, name)
        scheme = changes.pop("scheme", self.scheme)
        made = QTensor(self.parts if parts is None else parts, scheme, **{**fields, **changes})
        made.room = self.room
        if parts is None:
            made.piece_of_packed = self.piece_of_packed
        return made

    def map_parts(self, fn: Callable[[Tensor], Tensor], **changes: Any) -> QTensor:
        """Apply ``fn`` to every part; the layout stays the same."""
        every = {name: None if (part := getattr(self, name)) is None else fn(part) for name in PARTS}
        return self.with_parts(every, **changes)

    def with_parts(self, every: Mapping[str, Tensor | None], **changes: Any) -> QTensor:
        """This tensor with all parts replaced by ``every``; parts missing from it become None."""
        parts, extra = split_parts(every)
        return self.replace(parts, **extra, **changes)

    def to_layout(self, name: str) -> QTensor:
        """Convert to the layout called ``name``; LayoutError if that layout cannot hold it."""
        return self.replace(layouts.repack(self.matrix, self.parts, self.bits_layout, name), bits_layout=name)

    def to_device_layout(self) -> QTensor:
        """Convert to the layout that its device prefers."""
        plain = self.to_layout("plain")
        return plain.to_layout(layouts.preferred(self.qdata.device, self.matrix, plain.parts, self.scheme.act))

    # -- torch's protocols ---------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [name for name in PARTS if getattr(self, name) is not None]
        with torch._C.DisableTorchFunctionSubclass():
            return names, (self.scheme, self.bits_layout, self.matrix, self.transposed, self.repeated, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> QTensor:
        scheme, bits_layout, matrix, transposed, repeated, dtype = context
        parts, extra = split_parts(inner)
        return cls(
            parts,
            scheme,
            shape=size,
            dtype=dtype,
            matrix=matrix,
            bits_layout=bits_layout,
            transposed=transposed,
            repeated=repeated,
            **extra,
        )

    def _stable_hash_for_caching(self) -> str:
        """Key of torch.compile's cache: everything a traced graph depends on, excluding data."""
        names, context = self.__tensor_flatten__()
        parts = [(name, part.dtype, part.shape, part.stride()) for name in names for part in (getattr(self, name),)]
        with torch._C.DisableTorchFunctionSubclass():
            return f"bitport.QTensor {source_key()} {self.shape} {parts} {context}"

    @classmethod
    @not_compiled_alone
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = function_for(FUNCTIONS, func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        return recorded(made, QTensor)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = handled(ATEN, func, args, kwargs or {})
        if made is NotImplemented:
            unsupported(func, args, kwargs)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype, device = tuple(self.shape), self.dtype, self.device
        lies = f"layout={self.bits_layout!r}{', transposed' if self.transposed else ''}"
        return f"QTensor({self.scheme}, shape={shape}, dtype={dtype}, device='{device}', {lies})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QTensor:
        if id(self) not in memo:
            copy = self.map_parts(torch.clone)
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=False)  # type: ignore[assignment]
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle in the canonical layout, so that it can be read on any device."""
        from bitport.tensor.pickling import reduced

        return reduced(self.to_layout("plain"), isinstance(self, torch.nn.Parameter))

    def share_memory_(self) -> QTensor:
        self.map_parts(Tensor.share_memory_)
        return self

    def is_shared(self) -> bool:
        return self.qdata.is_shared()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the canonical parts, as in a checkpoint; what a layout repeats or pads does not count."""
        layout, plain = layouts.layout(self.bits_layout), layouts.layout("plain").expects(self.matrix)
        batch = math.prod(self.qdata.shape[: self.qdata.dim() - layout.data_ndim])
        size = batch * math.prod(plain.data_shape) * plain.data_dtype.itemsize
        size += sum(batch * math.prod(plain.scale_shape) * p.itemsize for p in (self.scale, self.zero) if p is not None)
        return size + sum(p.nbytes for name in ("scale2", *EXTRA) if (p := getattr(self, name)) is not None)


def split_parts(parts: Mapping[str, Tensor | None]) -> tuple[Quantized, dict[str, Any]]:
    """(the parts of the matrix, those in EXTRA by name) of ``parts`` by name; a missing one becomes None."""
    part = parts.get
    quantized = Quantized(part("qdata"), part("scale"), part("zero"), part("scale2"))  # type: ignore[arg-type]
    return quantized, {name: part(name) for name in EXTRA}


def unsupported(func: Any, *given: Any) -> NoReturn:
    q = next(each for each in torch.utils._pytree.tree_leaves(given) if isinstance(each, QTensor))
    what = f"({q.scheme}, {[*q.shape]}), which stands for a weight in linear, embedding, conv and matmul"
    raise UnsupportedError(f"{func} is not defined on a QTensor {what}{INSTEAD}")


def from_parts(
    parts: Quantized,
    scheme: Scheme,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    transposed: bool = False,
    bits_layout: str = "plain",
    **extra: Tensor | None,
) -> QTensor:
    """Make a QTensor of untrusted ``parts``, after checking them against each other and against ``shape``."""
    if not dtype.is_floating_point:
        raise ArgumentError(f"a quantized tensor stands for a float tensor, not for {dtype}")
    check_dense([*parts._asdict().items(), *extra.items()])
    batched = parts.data.ndim > layouts.layout(bits_layout).data_ndim
    if transposed and not batched and len(shape) > 2:
        raise ArgumentError(
            f"only a matrix or a stack of matrices can lie transposed, not a tensor of the shape {list(shape)}"
        )
    n, k = rows_and_columns(shape, batched, transposed)
    matrix = matrix_of(scheme.weight, n, k)
    batch = tuple(shape[:-2]) if batched else ()
    if bits_layout != "plain":
        check_packed(parts, scheme.weight, matrix, bits_layout, batch)
    canonical = layouts.repack(matrix, parts, bits_layout, "plain")
    check_parts(canonical, scheme.weight, matrix, batch)
    check_zero(canonical.zero, scheme.weight)
    check_extra(k, parts.data.device, **extra)
    return QTensor(
        parts,
        scheme,
        shape=tuple(shape),
        dtype=dtype,
        matrix=matrix,
        bits_layout=bits_layout,
        transposed=transposed,
        **extra,
    )


def quantize_tensor(
    value: Tensor,
    scheme: Scheme | str,
    *,
    kind: str = "linear",
    transposed: bool = False,
    by: Callable[[Tensor, Format], Quantized] = quantize,
    **extra: Tensor | None,
) -> QTensor:
    """Round ``value`` to nearest in ``scheme`` (or the preset of that name), in the layout its device prefers.

    A convolution's weight ([out, in, *kernel], ``kind="conv"``) is quantized as the matrix [out, in * kernel], that of
    a transposed convolution ([in, out, *kernel]) as [in, out * kernel]. A ``transposed`` matrix is stored as
    [.., K, N]. ``by`` replaces the function that chooses codes and scales.

    Assign it to a module as a new parameter, ``layer.weight = nn.Parameter(q, requires_grad=False)``. With
    ``layer.weight.data = q`` the float parameter would have no memory, and PyTorch would crash when it reads it.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise ArgumentError(f"only a dense tensor can be quantized, not {getattr(value, 'layout', type(value))}")
    if value.dim() < 2 or value.dtype not in FLOATS:
        raise ArgumentError(
            f"only a matrix [..., N, K] of float32, bfloat16 or float16 can be quantized, not {value.dtype} "
            f"{list(value.shape)}; cast float64 with .float() first"
        )
    if kind not in KINDS:
        raise ArgumentError(f"a weight is of kind {', '.join(KINDS)}, not {kind!r}")
    scheme = scheme_of(scheme)
    rows = rows_of(value, kind, transposed)
    if any(size == 0 and block == 0 for size, block in zip(rows.shape[-2:], scheme.weight.block, strict=True)):
        raise ArgumentError(f"an empty matrix {list(rows.shape)} has no range to choose the one scale of {scheme} from")
    parts = FUNCTIONS.get(by, by)(rows.detach(), scheme.weight)  # for quantize, the device's best kernel
    made = from_parts(
        parts,
        scheme,
        shape=tuple(value.shape),
        dtype=value.dtype,
        transposed=transposed,
        **extra,  # type: ignore[arg-type]
    )
    return made.to_device_layout()


def rows_of(value: Tensor, kind: str, transposed: bool) -> Tensor:
    """View a weight as the matrix [.., N, K] that is quantized."""
    return value.flatten(1) if kind == "conv" else value.transpose(-1, -2) if transposed else value


def rebuild(*described: Any) -> QTensor:
    """Unpickle what ``QTensor.__reduce_ex__`` wrote; the only function of bitport that torch.load may call. Files refer
    to it by this name."""
    from bitport.tensor.pickling import rebuilt

    return rebuilt(*described)
