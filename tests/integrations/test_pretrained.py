"""from_pretrained on checkpoints of bitport, compared with load_model."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import json
import pickle
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitport as bp
from bitport.checkpoint import quantize_files, read_manifest
from bitport.checkpoint.manifest import INDEX
from bitport.errors import ArgumentError, CheckpointError
from bitport.integrations.huggingface import load_model, save_model
from bitport.interop import convert
from bitport.tensor import QTensor
from tests.checkpoint import models
from tests.scripts import ended, printed

from .sizes import SMALL

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
pytest.importorskip("transformers.core_model_loading", reason="this version of transformers loads models otherwise")
from transformers.quantizers import HfQuantizer  # noqa: E402

from bitport.integrations.transformers import BitportConfig, Quantizer, stored  # noqa: E402

from .test_transformers import CONFIGS, HEAD, IDS, made  # noqa: E402

SCHEMES = [name for name, scheme in bp.PRESETS.items() if not scheme.static]
CAUSAL = transformers.AutoModelForCausalLM


def quantized(folder: Path, name: str = "llama", recipe: Any = "int4-g32", **given: Any) -> Path:
    made(name, folder / "float")
    quantize_files(folder / "float", folder / "out", recipe, progress=False, **given)
    return folder / "out"


def assert_same(model: nn.Module, right: nn.Module) -> None:
    assert any(isinstance(param, QTensor) for param in right.parameters())
    models.assert_same(model, right)


@pytest.mark.parametrize("recipe", ["int4-g32", HEAD])
@pytest.mark.parametrize("name", CONFIGS)
def test_models(tmp_path: Path, name: str, recipe: Any) -> None:
    """Conv1D of GPT-2, tied heads, experts stored separately in the files."""
    if recipe is HEAD and name == "gpt2":
        recipe = {"lm_head": "int8", "*wte": "int8", "*": "int4-g32"}
    out = quantized(tmp_path, name, recipe)
    model, right = CAUSAL.from_pretrained(out), load_model(out)
    assert_same(model, right)
    assert torch.equal(model(IDS).logits, right(IDS).logits)
    tied = model.config.tie_word_embeddings
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    assert not model.training
    trained = [[param.requires_grad for param in each.parameters()] for each in (model, right)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(tmp_path: Path, scheme: str) -> None:
    out = quantized(tmp_path, "tied", scheme, shard_size=20_000)
    assert len(read_manifest(out).shards) > 2
    assert_same(CAUSAL.from_pretrained(out), load_model(out))


def test_static_scales(tmp_path: Path) -> None:
    made("llama", tmp_path / "float")
    model = load_model(tmp_path / "float")
    bp.quantize_(model, "int8-static", calibrate=[IDS])
    save_model(model, tmp_path / "out")
    assert_same(CAUSAL.from_pretrained(tmp_path / "out"), load_model(tmp_path / "out"))


def test_what_was_converted(tmp_path: Path) -> None:
    out = quantized(tmp_path, recipe="int4-g32-sym")
    convert(out, tmp_path / "others", to="compressed-tensors", progress=False)
    convert(tmp_path / "others", tmp_path / "back", progress=False)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"] == {
        "quant_method": "bitport"
    }
    assert_same(CAUSAL.from_pretrained(tmp_path / "back"), load_model(tmp_path / "back"))
    convert(out, tmp_path / "plain", to="float", progress=False)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_other_heads(tmp_path: Path) -> None:
    """AutoModel, whose names lack a prefix, and a classifier, whose head is in no file."""
    out = quantized(tmp_path)
    right = load_model(out)
    assert_same(transformers.AutoModel.from_pretrained(out), right.model)
    model, said = transformers.AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert_same(model.model, right.model)
    assert said["missing_keys"] == {"score.weight"}
    assert said["unexpected_keys"] == {"lm_head.weight"}
    assert 0.001 < float(model.score.weight.detach().std()) < 0.1  # initializer_range is 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    out = quantized(tmp_path, recipe={"*embed*": "int8", "*": "int4-g32"})
    model = CAUSAL.from_pretrained(out, dtype=dtype)
    assert_same(model, load_model(out, dtype=dtype))
    assert {param.dtype for param in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_what_works_on_such_a_model(tmp_path: Path) -> None:
    """Everything that docs/transformers.md lists."""
    out = quantized(tmp_path)
    model, right = CAUSAL.from_pretrained(out), load_model(out)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    written = right.generate(IDS, **options)
    assert written.shape == (2, 15)
    assert torch.equal(model.generate(IDS, **options), written)
    assert torch.equal(copy.deepcopy(model).generate(IDS, **options), written)
    with torch.no_grad():
        expected = right(IDS).logits
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(IDS).logits, expected)
    assert {each.device.type for each in model.to("meta").parameters()} == {"meta"}
    assert {each.dtype for each in CAUSAL.from_pretrained(out).to(torch.bfloat16).parameters()} == {torch.bfloat16}
    for cast in ("half", "float"):
        with pytest.raises(ValueError, match="is not supported for quantized model"):
            getattr(CAUSAL.from_pretrained(out), cast)()


def test_the_way_back_to_floats(tmp_path: Path) -> None:
    """As docs/transformers.md says, for both ways to load a model: what is written needs no bitport."""
    out = quantized(tmp_path)
    right, model = bp.dequantize_(load_model(out)), CAUSAL.from_pretrained(out)
    model.dequantize()
    for name, each in {"own": right, "theirs": model}.items():
        each.save_pretrained(tmp_path / name)
        assert not (tmp_path / name / "bitport.json").exists()
        models.assert_same(CAUSAL.from_pretrained(tmp_path / name), right)


@pytest.mark.peers
def test_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a model has adapters, its save_pretrained writes these, as for any transformers model.

    transformers 5.24 asks for a PEFT that is not published yet, but works with the newest that is."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", peft.__version__)
    out = quantized(tmp_path)
    model = CAUSAL.from_pretrained(out)
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not (tmp_path / "adapter" / "bitport.json").exists()
    again = CAUSAL.from_pretrained(out)
    again.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert not torch.equal(again(IDS).logits, load_model(out)(IDS).logits)


def test_dtype_of_a_cast_model(tmp_path: Path) -> None:
    """config.json records the dtype that floats were cast to, so that transformers does not cast them back."""
    out = quantized(tmp_path, dtype=torch.bfloat16)
    model = CAUSAL.from_pretrained(out)
    assert_same(model, load_model(out))
    assert model.dtype == torch.bfloat16
    save_model(load_model(out, dtype=torch.float32), tmp_path / "wide")
    assert CAUSAL.from_pretrained(tmp_path / "wide").dtype == torch.float32


def test_parameters_that_are_float32_in_any_model(tmp_path: Path) -> None:
    """As in transformers: those that a model names, and those that it creates so."""
    config = transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=32, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, first_k_dense_replace=1,
    )  # fmt: skip
    model = CAUSAL.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "float")
    right = {name: each.dtype for name, each in CAUSAL.from_pretrained(tmp_path / "float").state_dict().items()}
    quantize_files(tmp_path / "float", tmp_path / "out", "int8", progress=False)
    found = {name: each.dtype for name, each in CAUSAL.from_pretrained(tmp_path / "out").state_dict().items()}
    assert found == right
    assert set(right.values()) == {torch.bfloat16, torch.float32}


def test_weights_that_are_one_in_this_model_alone(tmp_path: Path) -> None:
    model = CAUSAL.from_config(CONFIGS["llama"]())
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    bp.quantize_(model, "int4-g32")
    save_model(model, tmp_path)
    layers = CAUSAL.from_pretrained(tmp_path).model.layers
    assert layers[1].mlp.up_proj.weight is layers[0].mlp.up_proj.weight
    assert_same(CAUSAL.from_pretrained(tmp_path), load_model(tmp_path))


def test_plans_of_transformers_are_refused(tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    config.distributed_config = {"tp_size": 2}
    files = [str(quantized(tmp_path) / "bitport.json")]
    with pytest.raises(ArgumentError, match=r"a distributed_config .* cuts tensors while they are read"):
        stored(CAUSAL.from_config(config), files, {})


def test_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layout of its cache: symlinks in a folder for the revision, to files named by hash."""
    out = quantized(tmp_path)
    home = tmp_path / "hub" / "models--me--llama"
    (home / "blobs").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    (home / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for number, path in enumerate(sorted(out.iterdir())):
        path.rename(home / "blobs" / str(number))
        (home / "snapshots" / ("0" * 40) / path.name).symlink_to(home / "blobs" / str(number))
    model = CAUSAL.from_pretrained("me/llama", cache_dir=tmp_path / "hub", local_files_only=True)
    assert_same(model, load_model(home / "snapshots" / ("0" * 40)))


def test_what_transformers_fetches(tmp_path: Path) -> None:
    out = quantized(tmp_path, shard_size=20_000)
    index = json.loads((out / INDEX).read_text())
    assert set(index["weight_map"].values()) == {"bitport.json", *read_manifest(out).shards}
    config = json.loads((out / "config.json").read_text())
    del config["dtype"]
    (out / "config.json").write_text(json.dumps(config))
    assert CAUSAL.from_pretrained(out).dtype == torch.float32


def test_directories_of_earlier_versions(tmp_path: Path) -> None:
    out = quantized(tmp_path)
    right = load_model(out)
    said = json.loads((out / "config.json").read_text())
    del said["quantization_config"]
    (out / "config.json").write_text(json.dumps(said))
    (out / INDEX).unlink()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        CAUSAL.from_pretrained(out)
    assert_same(load_model(out), right)
    save_model(load_model(out), tmp_path / "new")
    assert_same(CAUSAL.from_pretrained(tmp_path / "new"), right)
    convert(out, tmp_path / "float again", to="float", progress=False)


def test_without_the_import(tmp_path: Path) -> None:
    """transformers refuses instead of initializing weights at random."""
    out = quantized(tmp_path)
    code = f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({str(out)!r})"
    run = ended(code)
    assert run.returncode
    assert "OSError: Error no file named model.safetensors" in run.stderr


def damaged(out: Path, what: str) -> None:
    (shard,) = out.glob("*.safetensors")
    if what == "shard":
        shard.unlink()
    elif what == "data":
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    elif what == "manifest":
        (out / "bitport.json").write_text((out / "bitport.json").read_text().replace("qdata", "qdate", 1))
    else:
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shard", r"model-.* cannot be opened"),
        ("data", r"the data of model.norm.weight is damaged. Fetch or save the checkpoint again"),
        ("manifest", r"bitport\.json: its checksum does not match its content"),
        (
            "shape",
            r"6 of another shape: model.layers.0.mlp.down_proj.weight \(checkpoint \[64, 128\], model \[64, 96\]\)",
        ),
    ],
)
def test_damage(tmp_path: Path, what: str, message: str) -> None:
    out = quantized(tmp_path)
    damaged(out, what)
    with pytest.raises(CheckpointError, match=message):
        CAUSAL.from_pretrained(out)


@pytest.mark.parametrize("kind", ["stored", "while loading"])
def test_save_pretrained(tmp_path: Path, kind: str) -> None:
    """It writes the same as save_model, for both ways to create such a model."""
    out = quantized(tmp_path)
    while_loading = {"quantization_config": BitportConfig("int4-g32")}
    model = (
        CAUSAL.from_pretrained(out) if kind == "stored" else CAUSAL.from_pretrained(tmp_path / "float", **while_loading)
    )
    model.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    save_model(model, tmp_path / "two", shard_size=20_000)
    one, two = read_manifest(tmp_path / "one"), read_manifest(tmp_path / "two")
    assert len(one.shards) == len(two.shards) > 2
    assert [(each.name, each.parts, each.scheme) for each in one.tensors.values()] == [
        (each.name, each.parts, each.scheme) for each in two.tensors.values()
    ]
    files = {name: {path.name for path in (tmp_path / name).iterdir()} for name in ("one", "two")}
    assert files["one"] - one.shards.keys() == files["two"] - two.shards.keys()
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert_same(CAUSAL.from_pretrained(tmp_path / "one"), load_model(out))


def test_save_pretrained_again(tmp_path: Path) -> None:
    """From a copy of the model, and with arguments that are respected or refused."""
    model = CAUSAL.from_pretrained(quantized(tmp_path))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.norm.weight.fill_(3)
    copied.save_pretrained(tmp_path / "copy")
    assert bool((load_model(tmp_path / "copy").model.norm.weight == 3).all())
    copied.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()
    model.save_pretrained(tmp_path / "safe", safe_serialization=True)
    assert_same(load_model(tmp_path / "safe"), model)
    refused = {"state_dict": {"a": torch.ones(1)}, "push_to_hub": True, "variant": "fp16", "safe_serialization": False}
    for name, value in refused.items():
        with pytest.raises(ArgumentError, match=f"not {name}(=False)?; model.push_to_hub"):
            model.save_pretrained(tmp_path / "none", **{name: value})


@pytest.mark.parametrize("kind", ["stored", "while loading"])
def test_a_model_goes_with_its_last_name(tmp_path: Path, kind: str) -> None:
    """Immediately, rather than in a later garbage collection. Copies save themselves, including temporary ones."""
    out = quantized(tmp_path)
    given = {} if kind == "stored" else {"quantization_config": BitportConfig("int4-g32")}
    load = functools.partial(CAUSAL.from_pretrained, out if kind == "stored" else tmp_path / "float", **given)
    model, right = load(), load_model(out)
    gone, weight = weakref.ref(model), weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    gc.disable()
    try:
        del model
        assert gone() is None
        assert weight() is None
    finally:
        gc.enable()
    model = load()
    model.generation_config = transformers.GenerationConfig(max_new_tokens=3)
    made = {"itself": load, "copy": lambda: copy.deepcopy(load()), "pickle": lambda: pickle.loads(pickle.dumps(load()))}
    for name, make in {**made, "changed": lambda: model}.items():
        make().save_pretrained(tmp_path / name)
        assert_same(load_model(tmp_path / name), right)
    assert json.loads((tmp_path / "changed" / "generation_config.json").read_text())["max_new_tokens"] == 3
    copied = copy.deepcopy(model)
    assert copied.hf_quantizer.model.lm_head is copied.lm_head
    assert not copied.hf_quantizer.is_qat_trainable


def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = importlib.import_module("transformers.utils.hub")
    uploaded: dict[str, bytes] = {}

    class Api:
        def create_repo(self, repo_id: str, **given: Any) -> Any:
            return types.SimpleNamespace(repo_id=repo_id)

    def upload(self: Any, folder: str, *args: Any, **given: Any) -> None:
        uploaded.update({path.name: path.read_bytes() for path in Path(folder).iterdir()})

    monkeypatch.setattr(hub, "hf_api", Api, raising=False)
    monkeypatch.setattr(hub, "create_repo", Api().create_repo, raising=False)  # for transformers before 5.20
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **given: types.SimpleNamespace(save=print))
    model = CAUSAL.from_pretrained(quantized(tmp_path))
    monkeypatch.setattr(type(model), "_upload_modified_files", upload)
    model.push_to_hub("me/llama")
    for name, data in uploaded.items():
        (tmp_path / "fetched").mkdir(exist_ok=True)
        (tmp_path / "fetched" / name).write_bytes(data)
    assert_same(CAUSAL.from_pretrained(tmp_path / "fetched"), model)


def test_a_model_quantized_in_memory_is_saved_by_save_model(tmp_path: Path) -> None:
    model = CAUSAL.from_config(CONFIGS["llama"]())
    bp.quantize_(model, "int4-g32")
    with pytest.raises(ArgumentError, match="save_model of bitport"):
        model.save_pretrained(tmp_path)
    save_model(torch.compile(model), tmp_path)  # where transformers has put its configuration
    assert_same(CAUSAL.from_pretrained(tmp_path), model)


def test_save_model_leaves_the_model_that_was_quantized(tmp_path: Path) -> None:
    made("llama", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    model = CAUSAL.from_pretrained(tmp_path)
    bp.quantize_(model, "int4-g32")
    with pytest.raises(ArgumentError, match=r"another model already \(model.safetensors\); choose another directory"):
        save_model(model, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["tied", "mixtral"])
def test_memory_footprint(tmp_path: Path, name: str) -> None:
    """Against the bytes of the parts in the manifest, computed by hand: 4 bits, and for every 32 of them a float32
    scale and a one-byte zero point."""
    out = quantized(tmp_path, name)
    model = CAUSAL.from_pretrained(out)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert model.get_memory_footprint() - buffers == read_manifest(out).nbytes
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert weight.nelement() * weight.element_size() == 64 * 64 // 2 + 64 * 2 * (4 + 1)


def test_devices_are_planned_by_true_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks the quantizer for the bytes per element of a model without weights."""
    sizes = importlib.import_module("transformers.integrations.accelerate").compute_module_sizes
    seen: list[float] = []
    before = Quantizer.get_quantize_ops

    def first(self: Any) -> Any:
        seen.append(sizes(self.model, self)[0][""])
        return before(self)

    monkeypatch.setattr(Quantizer, "get_quantize_ops", first)
    monkeypatch.setattr(Quantizer, "preprocess_model", lambda self, model, **given: keep(self, model, given))

    def keep(self: Any, model: Any, given: dict[str, Any]) -> None:
        self.model = model
        HfQuantizer.preprocess_model(self, model, **given)

    out = quantized(tmp_path)
    model = CAUSAL.from_pretrained(out)
    assert seen[0] == read_manifest(out).nbytes + sum(buffer.nbytes for buffer in model.buffers())


@pytest.mark.peers
def test_device_maps(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    out = quantized(tmp_path)
    right = load_model(out)
    assert_same(CAUSAL.from_pretrained(out, device_map={"": "cpu"}), right)
    size = 2 * read_manifest(out).nbytes  # 5.25 bits instead of 32 per weight, with room for the largest layer twice
    assert size < 0.6 * sum(param.nbytes for param in load_model(tmp_path / "float").parameters())
    assert_same(CAUSAL.from_pretrained(out, device_map="auto", max_memory={"cpu": size}), right)
    for given in ({"device_map": {"": "disk"}}, {"device_map": "auto", "max_memory": {"cpu": size // 4}}):
        with pytest.raises(
            ArgumentError, match=r"leaves weights on disk \(.+\), from where accelerate brings plain arrays"
        ):
            CAUSAL.from_pretrained(out, offload_folder=tmp_path / "offload", **given)


PEAKS = """
import sys, torch, transformers
from pathlib import Path
import bitport.integrations.transformers
torch.set_num_threads(1)

def status(field):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(field)]
    return int(line.split()[1]) / 1024

def loaded(directory):
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    before = status("RssAnon"), status("VmRSS")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    return model, status("VmHWM") - before[1], status("RssAnon") - before[0]

loaded(sys.argv[1])
print(*loaded(sys.argv[2])[1:])
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux tells it")
def test_memory(tmp_path: Path) -> None:
    """48 layers of 850,000 weights are 39 MiB in int8 and four times that in float32. Besides the mapped file they are
    in memory once, in the layout of the device; the modules of 48 layers take 5 MB."""
    small = quantized(tmp_path / "small")
    sizes = {**SMALL, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 48}
    CAUSAL.from_config(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "float")
    out = tmp_path / "out"
    quantize_files(tmp_path / "float", out, "int8", progress=False)
    held = read_manifest(out).nbytes / 2**20
    peak, own = map(float, printed(PEAKS, small, out).split())
    assert own < held + 16
    assert peak < 2 * held + 16
