"""from_pretrained(.., quantization_config=BitportConfig(..)), compared with quantize_() on the float model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import bitport as bp
from bitport.checkpoint import quantize_files
from bitport.errors import ArgumentError, RecipeError
from bitport.integrations.huggingface import load_model, save_model
from bitport.tensor import QTensor
from tests.scripts import printed

from .sizes import SMALL

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
pytest.importorskip("transformers.core_model_loading", reason="this version of transformers loads models otherwise")
from bitport.integrations.transformers import BitportConfig, left_alone  # noqa: E402

IDS = torch.arange(14).reshape(2, 7)
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
}
HEAD = {"lm_head": "int8", "*embed*": "int8", "*": "int4-g32"}
"""Also if the two are tied."""


@pytest.fixture(params=CONFIGS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return made(request.param, tmp_path)


def made(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(folder)
    return folder


def loaded(directory: Path, config: BitportConfig | None = None) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, quantization_config=config)


@pytest.mark.parametrize("recipe", ["int4-g32", "fp8-row", HEAD])
def test_it_is_what_quantize_makes(directory: Path, recipe: Any) -> None:
    if recipe is HEAD and "gpt2" in str((directory / "config.json").read_text()):
        recipe = {"lm_head": "int8", "*wte": "int8", "*": "int4-g32"}
    model, right = loaded(directory, BitportConfig(recipe)), loaded(directory)
    report = bp.quantize_(right, recipe)
    mine, theirs = dict(model.named_parameters()), dict(right.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, param in theirs.items():
        assert type(mine[name].data) is type(param.data)
        assert torch.equal(mine[name], param), name
    assert any(isinstance(param.data, QTensor) for param in mine.values())
    assert model.hf_quantizer.report == report
    assert torch.equal(model(IDS).logits, right(IDS).logits)


def test_algorithms_without_data(tmp_path: Path) -> None:
    made("llama", tmp_path)
    model, right = loaded(tmp_path, BitportConfig("int4-g32", algorithm="hqq", measure=False)), loaded(tmp_path)
    bp.quantize_(right, "int4-g32", algorithm="hqq")
    assert torch.equal(model(IDS).logits, right(IDS).logits)
    assert model.hf_quantizer.report.layers[1].algorithm == "hqq"


def test_it_is_saved_as_a_checkpoint_of_bitport(tmp_path: Path) -> None:
    made("tied", tmp_path / "in")
    model = loaded(tmp_path / "in", BitportConfig("int4-g32"))
    save_model(model, tmp_path / "out")
    assert torch.equal(load_model(tmp_path / "out")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"algorithm": "gptq"},
            r"gptq looks at the inputs of layers, .*: load it in float, .* bitport quantize --data",
        ),
        ({"recipe": "int8-static"}, r"14 weights .* have a static input scale, .*: load it in float, then quantize_"),
    ],
)
def test_what_wants_data_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    made("tied", tmp_path)
    with pytest.raises(ArgumentError, match=message):
        loaded(tmp_path, BitportConfig(**given))


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        (["lm_head", "model.layers.1"], {"lm_head": "skip", "*.layers.1.*": "skip"}),
        (["model.layers.[0-9]+.mlp", "q_proj"], {"*.mlp.*": "skip", "*.q_proj": "skip"}),
        (["model.embed_tokens"], {}),
    ],
)
def test_modules_that_are_left_alone(tmp_path: Path, given: list[str], recipe: dict[str, str]) -> None:
    made("llama", tmp_path)
    model, right = loaded(tmp_path, BitportConfig("int4-g32", modules_to_not_convert=given)), loaded(tmp_path)
    if recipe:
        bp.quantize_(right, [*recipe.items(), *bp.Recipe.of("int4-g32").rules])
    else:
        bp.quantize_(right, "int4-g32")
    assert torch.equal(model(IDS).logits, right(IDS).logits)
    mine, theirs = (
        [name for name, param in each.named_parameters() if isinstance(param.data, QTensor)] for each in (model, right)
    )
    assert mine == theirs != []


NAMES = [
    "lm_head",
    "model.lm_head",
    "layers.1.attn",
    "layers.11.attn",
    "layers.1",
    "mlp.gate_proj",
    "mlp.gate.wg",
    "fc1",
]
NAMES += ["model.decoder.fc1", "fc1.x", "visual.a.b", "a", "b.c", "ab", "layers.0.q", "layers.0.q.z", "k_proj.z"]


@pytest.mark.parametrize(
    "key",
    ["lm_head", "layers.1", "layers.*", "mlp.gate", "mlp.gate.", "fc1", "visual", "a|b", "layers.[01].q", "q|k_proj"],
)
def test_names_of_modules_fit_as_in_transformers(key: str) -> None:
    judge = pytest.importorskip("transformers.quantizers.quantizers_utils").should_convert_module
    (rule,) = left_alone([key])
    fits = [name for name in NAMES if rule.fits(bp.schemes.Target(name, "weight", "linear", (8, 8), name))]
    assert fits == [name for name in NAMES if not judge(name, [key])]


@pytest.mark.parametrize("given", ["lm_head", [""], [3]])
def test_what_is_no_list_of_modules(given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"is a list of names of modules, such as \['lm_head'\], not "):
        BitportConfig("int4", modules_to_not_convert=given)


def test_a_module_that_does_not_exist_is_told(tmp_path: Path) -> None:
    made("tied", tmp_path)
    with pytest.raises(RecipeError, match=r"heat.* fits no weight"):
        loaded(tmp_path, BitportConfig("int4-g32", modules_to_not_convert=["lm_heat"]))


def test_one_weight_gets_one_scheme(tmp_path: Path) -> None:
    made("tied", tmp_path)
    with pytest.raises(RecipeError, match="are one tied weight, but the rules ask for"):
        loaded(tmp_path, BitportConfig({"lm_head": "int8", "*": "int4-g32"}))


@pytest.mark.parametrize(
    ("changed", "scheme"), [({"intermediate_size": 96}, "int4-g32"), ({"vocab_size": 40}, {"lm_head": "int8"})]
)
def test_weights_of_another_shape(tmp_path: Path, changed: dict[str, int], scheme: Any) -> None:
    """As for float models: an error, or, in versions that initialize such weights, weights of the model's own shape,
    which are not quantized."""
    made("llama", tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    for given in ({}, {"quantization_config": BitportConfig(scheme)}):
        with pytest.raises((RuntimeError, ArgumentError), match="ignore_mismatched_sizes"):
            load(tmp_path, **changed, **given)
    if Version(transformers.__version__) < Version("5.23"):
        with pytest.raises(ArgumentError, match=r"in another shape than the model: .*, not \["):
            load(tmp_path, **changed, ignore_mismatched_sizes=True, quantization_config=BitportConfig(scheme))
        return
    model = load(tmp_path, **changed, ignore_mismatched_sizes=True, quantization_config=BitportConfig(scheme))
    right = load(tmp_path, **changed, ignore_mismatched_sizes=True)
    shapes = [{name: param.shape for name, param in each.named_parameters()} for each in (model, right)]
    assert shapes[0] == shapes[1]
    told = {layer.name: (layer.scheme, layer.reason) for layer in model.hf_quantizer.report.layers}
    names = {"lm_head.weight"} if "vocab_size" in changed else {name for name in told if ".mlp." in name}
    for name in names:
        assert told[name] == (None, "the files have it in another shape")
        assert not isinstance(model.get_parameter(name).data, QTensor)
    assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("recipe", ["int4-g32", {"*": "int8"}, {"lm_head": "int8"}, {"*embed*": "int8"}], ids=str)
def test_a_head_that_is_another_than_config_json_says(tmp_path: Path, recipe: Any) -> None:
    """config.json says that it is tied to the embedding, but the files hold both: transformers follows the files."""
    made("llama", tmp_path / "float")
    said = json.loads((tmp_path / "float" / "config.json").read_text())
    (tmp_path / "float" / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": True}))
    right = loaded(tmp_path / "float")
    bp.quantize_(right, recipe)
    quantize_files(tmp_path / "float", tmp_path / "out", recipe, progress=False)
    while_loading = loaded(tmp_path / "float", BitportConfig(recipe))
    stored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    schemes = {name: getattr(param, "scheme", None) for name, param in right.named_parameters()}
    for model in (while_loading, stored):
        assert torch.equal(model(IDS).logits, right(IDS).logits)
        assert {name: getattr(param, "scheme", None) for name, param in model.named_parameters()} == schemes


def test_dequantize_makes_a_float_model(tmp_path: Path) -> None:
    """Like bitport's dequantize_; its save_pretrained writes what transformers alone can load."""
    made("tied", tmp_path / "in")
    model, right = (loaded(tmp_path / "in", BitportConfig(HEAD)) for _ in range(2))
    bp.dequantize_(right)
    assert model.dequantize() is model
    assert torch.equal(model(IDS).logits, right(IDS).logits)
    model.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert torch.equal(loaded(tmp_path / "out")(IDS).logits, right(IDS).logits)
    model = loaded(tmp_path / "in", BitportConfig(HEAD)).dequantize(dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_a_config_prints_what_it_asks_for() -> None:
    assert repr(BitportConfig("int4")) == "BitportConfig(*=int4; algorithm=rtn, measure=True)"
    config = BitportConfig({"*.mlp.*": "int3", "*": "int8"}, algorithm="hqq", measure=False)
    assert repr(config) == "BitportConfig(*.mlp.*=int3, *=int8; algorithm=hqq, measure=False)"


def test_a_config_prints_what_was_loaded(tmp_path: Path) -> None:
    """It named int4 and rtn, the defaults of its arguments, whatever the files held."""
    made("llama", tmp_path / "float")
    loaded(tmp_path / "float", BitportConfig({"lm_head": "int8", "*": "int3-g32"}, algorithm="hqq")).save_pretrained(
        tmp_path / "out"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    schemes = [str(param.scheme) for param in model.parameters() if isinstance(param, QTensor)]
    config = model.config.quantization_config
    assert config.recipe is None
    assert config.stored == {"int3-g32": schemes.count("int3-g32"), "int8": 1}
    assert repr(config) == f"BitportConfig(as stored: int3-g32 ({len(schemes) - 1}), int8 (1))"
    assert repr(model.config).count("bitport") == 1  # as JSON: only the method


def test_the_config_of_a_loaded_model_loads_another(tmp_path: Path) -> None:
    """transformers asked it for its method as it asks the entry of a file, which it could not answer."""
    made("llama", tmp_path / "float")
    loaded(tmp_path / "float", BitportConfig("int4-g32")).save_pretrained(tmp_path / "out")
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "out")
    again = auto.from_pretrained(tmp_path / "out", config=model.config)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert repr(again.config.quantization_config) == repr(model.config.quantization_config)
    with pytest.raises(ArgumentError, match="load a state_dict by load_state_dict"):
        type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())


def test_backends_are_loaded_where_models_are_built() -> None:
    """from_pretrained loads them with meta as the default device, where tables would have no numbers."""
    code = "import torch, bitport.plugins\nwith torch.device('meta'): print(bitport.plugins.load())"
    assert "cpu" in printed(code)
