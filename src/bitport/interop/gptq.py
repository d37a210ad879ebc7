"""GPTQ (``quant_method: gptq``), as written by AutoGPTQ, GPTQModel and AutoRound. For a layer [N, K] with groups of g::

    qweight  int32 [K*b/32, N]    codes along K                qzeros  int32 [K/g, N*b/32]    zero points along N
    scales   float16 [K/g, N]     g_idx  int32 [K]: the group of each column

    value[n, k] = (code - zero) * scale, both of group g_idx[k]

The original format (``checkpoint_format: gptq``) stores zero points minus 1; ``gptq_v2`` stores them unchanged, and so
does ``gptq_p``, of 2 to 8 bits, in which both lie in planes (:func:`bitport.interop.words.of_planes`).
GPTQModel (``meta: {quantizer: [gptqmodel:..]}``) subtracts from whole words, so that a zero point of 0 borrows from the
next one; with 3 bits each is decremented separately, and 0 becomes 7. In files of other programs the largest number
means 2^b. If g_idx does not ascend ("act-order"), the columns of a group are not contiguous: bitport stores them sorted
by group, with the permutation. Without g_idx columns are in order, unless the configuration says desc_act.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import ArgumentError, CheckpointError
from bitport.interop import codec
from bitport.interop.checks import Stored, exactly, order_of
from bitport.interop.codec import Described, WeightNames, grouped, kind_of
from bitport.interop.configuration import agreed, compiled, one_of, refuse_unknown, setting
from bitport.interop.shifts import of_zero_points, zero_points
from bitport.interop.words import PLANES, from_codes, from_stream, of_planes, to_codes, to_stream, word_count
from bitport.numerics import FLOATS
from bitport.numerics.format import LONGEST_BLOCK
from bitport.numerics.packing import pack_bits, unpack_bits
from bitport.schemes import Scheme
from bitport.tensor import QTensor, from_parts

BITS = (2, 3, 4, 8)
"""Of codes in words of 32 bits."""
CHOOSING = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "act_group_aware", "hyb_act", "mse"),
    *("gptaq", "foem", "v2", "v2_alpha", "fallback", "failsafe", "hessian", "mock_quantization"),
    *("model_name_or_path", "model_file_base_name", "lm_head", "meta", "provider", "modules_to_not_convert"),
    *("dataset", "tokenizer", "processor", "image_processor", "template", "batch_size", "train_bs", "model_seqlen"),
    *("max_input_length", "pad_token_id", "cache_block_outputs", "block_name_to_quantize", "to_quant_block_names"),
    *("module_name_preceding_first_block", "modules_in_block_to_quantize", "quant_block_list", "supported_types"),
    *("backend", "disable_exllama", "use_exllama", "exllama_config", "use_cuda_fp16", "offload_to_disk"),
    *("autoround_version", "iters", "lr", "minmax_lr", "lr_scheduler", "nsamples", "seqlen", "sampler", "nblocks"),
    *("gradient_accumulate_steps", "amp", "low_gpu_mem_usage", "low_cpu_mem_usage", "enable_minmax_tuning"),
    *("enable_norm_bias_tuning", "enable_quanted_input", "enable_torch_compile", "enable_alg_ext", "enable_adam"),
    *("enable_full_range", "not_use_best_mse", "dynamic_max_gap", "disable_opt_rtn", "scale_dtype", "model_free"),
    *("quant_nontext_module", "extra_data_dir", "multimodal", "static_kv_granularity", "static_attention_granularity"),
    *("act_group_size", "act_sym", "act_dynamic", "act_data_type"),
)
"""Settings by which AutoGPTQ, GPTQModel, transformers and AutoRound choose numbers, or load them. Those of inputs
(act_..) have no effect without act_bits."""
USUAL = {"data_type": "int", "act_bits": 16, "pack_dtype": "int32"}
OF_LAYERS = ("bits", "group_size", "sym", "desc_act")


class Form(NamedTuple):
    bits: tuple[int, ...]
    """The numbers of bits that a code may have."""
    less: int
    """What zero points are stored less."""
    planar: bool = False
    """Whether codes lie in planes."""


FORMS = {"gptq": Form(BITS, 1), "gptq_v2": Form(BITS, 0), "gptq_p": Form(tuple(PLANES), 0, planar=True)}
"""By checkpoint_format."""


class Settings(NamedTuple):
    bits: int
    group: int
    """Columns of a group; 0: the whole row."""
    symmetric: bool
    reordered: bool
    """Whether the columns of a group may be scattered."""

    @classmethod
    def of(cls, config: Mapping[str, Any], known: tuple[int, ...]) -> Settings:
        """``known``: the numbers of bits that are read."""
        bits, group = setting(config, "bits", int), setting(config, "group_size", int)
        if bits not in known:
            raise CheckpointError(
                f"GPTQ with bits={bits}: {', '.join(map(str, known))} are read (5 to 7 in the format gptq_p)"
            )
        if not 1 <= group < LONGEST_BLOCK and group != -1:
            raise CheckpointError(
                f"GPTQ with group_size={group}: must be at least 1 and below 2^31, or -1 for one group a row"
            )
        symmetric, reordered = setting(config, "sym", bool, False), setting(config, "desc_act", bool, False)
        return cls(bits, max(group, 0), symmetric, reordered)


class Overrides:
    """Settings for individual layers: those of the first regular expression that matches a name, where "-:" marks
    layers that are not quantized. There may be tens of thousands of plain names ("^a\\.b$"), which are looked up in a
    dictionary."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.own: list[dict[str, Any]] = []
        self.plain: dict[str, int] = {}
        self.patterns: list[tuple[int, re.Pattern[str]]] = []
        dynamic = setting(config, "dynamic", dict, {})
        for pattern in dynamic:
            expression = compiled(pattern[2:] if pattern[:2] in ("-:", "+:") else pattern)
            self.own.append(setting(dynamic, pattern, dict, {}))
            refuse_unknown(self.own[-1], (*OF_LAYERS, *CHOOSING), f"dynamic of {pattern!r}", USUAL)
            name = re.sub(r"\\(\W)", r"\1", expression.pattern[1:-1])
            if pattern.startswith("-:"):
                continue
            if expression.pattern == f"^{re.escape(name)}$":
                self.plain.setdefault(name, len(self.own) - 1)
            else:
                self.patterns.append((len(self.own) - 1, expression))

    def of(self, module: str) -> dict[str, Any]:
        end = self.plain.get(module, len(self.own))
        first = next((at for at, pattern in self.patterns if at < end and pattern.match(module)), end)
        return self.own[first] if first < len(self.own) else {}


class Reader(codec.Reader):
    known = (
        *("quant_method", "method", "checkpoint_format", "format", "is_marlin_format", "dynamic"),
        *("rotation", "activation", *OF_LAYERS, *CHOOSING),
    )
    usual = USUAL
    writes_zero_biases = True

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        one_of(config, "method", ("gptq",))
        said = agreed(config, ("checkpoint_format", "format"), str, "gptq")
        if said not in FORMS or setting(config, "is_marlin_format", bool, False):
            raise CheckpointError(f"GPTQ in the format {said!r} (or Marlin's): {', '.join(FORMS)} are read")
        if rotation := config.get("rotation"):
            raise CheckpointError(
                f"GPTQ with rotation {rotation!r}: inputs of layers are rotated on each call, which bitport does not do"
            )
        if config.get("activation"):
            self.notes.append(
                "activation: inputs are rounded to floats of 8 or 4 bits there, and used as they are here"
            )
        self.form = FORMS[said]
        self.wraps = (
            self.form.less > 0 and "gptqmodel:" in str(setting(config, "meta", dict, {}).get("quantizer")).lower()
        )
        self.overrides = Overrides(config)
        self.common = Settings.of(config, self.form.bits)

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found = grouped(held, "qweight", ("qzeros", "scales"), ("g_idx",), telling=("qzeros", "g_idx"))
        if embeddings := [weight.name for weight in found if kind_of(weight.name, (1, 1)) == "embedding"]:
            raise CheckpointError(
                f"{embeddings[0]} is an embedding, which lies the other way round in a file of GPTQ and is not read"
            )
        return found

    def read(self, weight: Stored) -> Tensor:
        its = self._settings(weight.name.removesuffix(".weight"))
        qweight = weight.expect("qweight", (torch.int32,), (None, None))
        k, n = qweight.shape[0] * 32 // its.bits, qweight.shape[1]
        scale = weight.expect("scales", FLOATS, (None, n)).t()
        qzeros = weight.expect("qzeros", (torch.int32,), (scale.shape[1], word_count(n, its.bits)))
        zero = self._zero(qzeros, n, its.bits).t()
        if int(zero.max()) > 255:
            raise CheckpointError(f"{weight.names['qzeros']} has the zero point 256: 8 bits end at 255")
        if self.form.planar:
            stream = pack_bits(of_planes(qweight.t(), its.bits), its.bits)
        else:
            stream = to_stream(qweight.t(), k, its.bits)
        perm = self._order(weight, k, its)
        if perm is not None:
            stream = pack_bits(unpack_bits(stream, its.bits, k)[:, perm.long()], its.bits)
        parts, fmt = of_zero_points(stream, scale, zero, its.bits, (1, its.group), droppable=its.symmetric)
        return from_parts(parts, Scheme(weight=fmt), shape=(n, k), dtype=self.dtype, perm=perm)

    def _order(self, weight: Stored, k: int, its: Settings) -> Tensor | None:
        group = its.group or k
        if "g_idx" in weight:
            return order_of(weight["g_idx"], k, group, weight.names["g_idx"])
        if its.reordered and group < k:
            raise CheckpointError(
                f"{weight.names['qweight']} is there without g_idx, and quantization_config says desc_act: nothing "
                f"tells which columns a scale belongs to; fetch the checkpoint again"
            )
        return None

    def _zero(self, qzeros: Tensor, n: int, bits: int) -> Tensor:
        """int16 [groups, n]"""
        if self.form.planar:
            return of_planes(qzeros, bits).to(torch.int16)
        highest = (1 << bits) - 1
        if self.wraps and 32 % bits == 0:
            return to_codes(qzeros + 0xFFFFFFFF // highest, n, bits).to(torch.int16)
        zero = to_codes(qzeros, n, bits).to(torch.int16) + self.form.less
        return zero & highest if self.wraps else zero

    def _settings(self, module: str) -> Settings:
        own = self.overrides.of(module)
        return Settings.of({**self.config, **own}, self.form.bits) if own else self.common


class Writer(codec.Writer):
    """Writes ``checkpoint_format: gptq``. The format has one scheme for all weights."""

    name = "gptq"

    def __init__(self) -> None:
        super().__init__()
        self.reordered = False

    def refuses(self, q: Described) -> str | None:
        fmt = q.scheme.weight
        if wrong := codec.no_layer(q, "GPTQ quantizes"):
            return wrong
        if fmt.dtype not in [f"int{bits}" for bits in BITS] or fmt.block[0] != 1 or fmt.zero == "float" or q.scheme.act:
            return f"GPTQ holds integers of {', '.join(map(str, BITS))} bits in groups, inputs as they are"
        if "pre_scale" in q.parts:
            return "GPTQ has no scales of inputs (pre_scale)"
        n, k = q.shape
        if n % 32 or k % 32:
            return f"GPTQ takes multiples of 32 rows and columns, not {n}x{k}"
        return self.refuses_another_scheme(q, "GPTQ has")

    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        k = q.matrix.k
        bits, group = q.scheme.weight.number.bits, q.matrix.block_k
        group_of = torch.arange(k, dtype=torch.int32) // group
        stream = q.qdata
        if q.perm is not None:
            self.reordered = True
            order = q.perm.long()
            codes = unpack_bits(stream, bits, k)
            stream = pack_bits(torch.empty_like(codes).index_copy(1, order, codes), bits)
            group_of = torch.empty_like(group_of).index_copy(0, order, group_of)
        zero = zero_points(q).to(torch.uint8)
        less = FORMS[self.name].less
        low, high = int(zero.min()), int(zero.max())
        if low < less or high - less >= 1 << bits:
            raise ArgumentError(
                f"{name}: zero points from {low} to {high} do not fit the format {self.name}, which stores them less "
                f"{less} in {bits} bits" + ("; gptq_v2 stores them as they are" if less else "")
            )
        module = name.removesuffix(".weight")
        return {
            f"{module}.qweight": from_stream(stream, k, bits).t().contiguous(),
            f"{module}.qzeros": from_codes((zero - less).t().contiguous(), bits),
            f"{module}.scales": exactly(q.scale, torch.float16, f"{module}: a scale of GPTQ").t().contiguous(),
            f"{module}.g_idx": group_of,
        }

    def config(self, left: list[str]) -> dict[str, Any]:
        assert self.scheme is not None
        fmt = self.scheme.weight
        said: dict[str, Any] = {
            "quant_method": "gptq",
            "checkpoint_format": self.name,
            "bits": fmt.number.bits,
            "group_size": fmt.block[1] or -1,
            "sym": fmt.zero == "none",
            "desc_act": self.reordered,
            "lm_head": "lm_head" not in left,
        }
        others = [name for name in left if name != "lm_head"]
        return said | ({"dynamic": {f"-:^{re.escape(name)}$": {} for name in others}} if others else {})


class WriterV2(Writer):
    name = "gptq_v2"
