"""Ready maps of tiny models, compared with NumPy; there and back; and what is refused. What the
models compute is in `test_ready_maps_logits.py`."""

import json
import re
import shlex

import hf_models
import hf_targets
import numpy as np
import pytest
import tunix_llama
from in_process import refused, shown
from layouts import save_pytree
from safetensors.numpy import load_file

import reshard
from reshard.cli.help import topics
from reshard.convert.mapfile import ORDER
from reshard.convert.remap import ready_maps
from reshard.tree import format_path, nested
from reshard.writer.export import plan_export

NAMES = [*ready_maps()]
# Hidden size, heads and vocabulary as the models have them; and the variants of one.
VARIANTS = {
    "as it is": {},
    "as many key-value heads": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
}


def model_of(name):
    return name.partition("-")[0]


def values(ckpt):
    return {format_path(a.path): a.read() for a in ckpt.arrays}


def assert_same(got, expected, rtol=0, atol=0):
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol, atol, err_msg=name)


@pytest.fixture
def llama(tmp_path):
    config = hf_models.CONFIGS["llama"]
    hf_models.write(tmp_path / "hf", config, hf_models.tensors(config))
    return tmp_path / "hf"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(tmp_path, name, variant):
    config = hf_models.CONFIGS[model_of(name)] | VARIANTS[variant]
    tensors = hf_models.tensors(config)
    hf_models.write(tmp_path / "hf", config, tensors)
    made = reshard.remap(reshard.open(tmp_path / "hf"), f"hf:{name}")
    project = hf_targets.TARGETS[name.partition("-")[2]]
    # MaxText's arithmetic rounds its factors to float32. For GPT-OSS there are none.
    rtol = 2e-7 if "maxtext" in name and "gpt_oss" not in name else 0
    assert_same(values(made), project(tensors, config), rtol)
    reshard.save(made, tmp_path / "out")
    again = reshard.ready_map(f"hf:{name}", tmp_path / "hf" / "config.json")
    back = values(reshard.remap(reshard.open(tmp_path / "out"), again, reverse=True))
    atol = 2.0**-23 if "gemma" in name and rtol else 0  # `(x + 1) - 1`
    expected = {key.replace(".", "/"): value for key, value in tensors.items()}
    assert_same(back, expected, rtol, atol)


@pytest.mark.parametrize("target", ["tunix", "maxtext"])
def test_the_text_model_of_text_and_images(tmp_path, target):
    config = hf_models.CONFIGS["gemma3"]
    tensors = hf_models.tensors(config)
    stored = {f"language_model.{name}": array for name, array in tensors.items()}
    stored["vision_tower.x"] = np.zeros(3, "float32")
    nested = {"model_type": "gemma3", "text_config": config}
    hf_models.write(tmp_path / "hf", nested, stored)
    ckpt = reshard.select(reshard.open(tmp_path / "hf"), drop="vision_tower/**")
    made = reshard.remap(ckpt, f"hf:auto-{target}")
    assert_same(values(made), hf_targets.TARGETS[target](tensors, config), 2e-7)


@pytest.mark.parametrize("scan_axis", [0, 1])
def test_llama_3_1_in_maxtext(tmp_path, scan_axis):
    """Its rotary embedding has pairs there."""
    config = hf_models.CONFIGS["llama"] | {"rope_scaling": {"rope_type": "llama3"}}
    tensors = hf_models.tensors(config)
    hf_models.write(tmp_path / "hf", config, tensors)
    rules = reshard.ready_map("hf:auto-maxtext", tmp_path / "hf", scan_axis=scan_axis)
    expected = hf_targets.maxtext(tensors, config)
    scanned = "params/params/decoder/layers/"
    for name in expected:
        if name.startswith(scanned):
            expected[name] = np.moveaxis(expected[name], 1, scan_axis)
    assert_same(values(reshard.remap(reshard.open(tmp_path / "hf"), rules)), expected, 2e-7)


@pytest.mark.parametrize("name", NAMES)
def test_operations_are_written_in_the_order_in_which_they_are_done(name):
    tensors = [each for group in ready_maps()[name]["tensors"].values() for each in group]
    for table in (*tensors, *(tensor.get("first", {}) for tensor in tensors)):
        written = [key for key in table if key in ORDER]
        assert written == sorted(written, key=ORDER.index)


def test_every_map_is_in_the_help():
    listed = re.findall(r"`hf:([\w-]+)`", topics()["maps"])
    assert {*NAMES} <= {*listed}


def test_the_commands(tmp_path, llama):
    shown(tmp_path, "ckpt", "hf", "out/0", "--map", "hf:auto-tunix", "--vocab", 64)
    got = values(reshard.open(tmp_path / "out/0"))
    tensors = load_file(llama / "model.safetensors")
    embedding = got["embedder/input_embedding/value"]
    np.testing.assert_array_equal(embedding[:48], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(embedding[48:], 0)
    words = ["--map", "hf:llama-tunix", "--reverse", "--vocab", 64]
    shown(tmp_path, "export", "out/0", "back", *words, "--like", "hf")
    shown(tmp_path, "ckpt", "out/0", "back.0", *words, "--config", "hf")
    assert_same(load_file(tmp_path / "back" / "model.safetensors"), tensors)
    assert reshard.diff(tmp_path / "back.0", llama, values=True).equal
    verified = ["--map", "hf:llama-tunix", "--vocab", 64]
    shown(tmp_path, "verify", "out/0", "--against", "hf", *verified)
    shown(tmp_path, "verify", "back", "--against", "out/0", *verified)
    told = refused(tmp_path, "verify", "out/0", "--against", "hf", *verified, "--init", "a")
    assert "with this --map, --init requires --model" in told
    told = refused(tmp_path, "export", "out/0", "more", *words[:-2], "--like", "hf")
    assert told.endswith("\n\nhint: --vocab 64, if the embedding of the JAX model has 64 rows\n")
    told = refused(tmp_path, "export", "out/0", "more", *words)
    assert told.endswith("config.json`\n\nhint: --config HF_DIR\n")
    told = refused(tmp_path, "export", "out/0", "more", *verified, "--like", "hf")
    assert told.endswith("\nhint: --reverse, if SRC has the names of the JAX model\n")


def test_leaves_that_a_map_does_not_have(tmp_path, llama):
    made = reshard.remap(reshard.open(llama), "hf:llama-maxtext")
    step = next(iter(made.arrays))
    more = {("opt_state", "count"): step, ("step",): step}
    more = {path: leaf.at(path) for path, leaf in more.items()}
    reshard.save(made.replace({**made, **more}), tmp_path / "out")
    words = ["export", "out", "back", "--map", "hf:llama-maxtext", "--reverse", "--like", "hf"]
    told = refused(tmp_path, *words)
    assert told.endswith("\n\nhint: --drop 'opt_state/**' --drop step leaves these leaves out\n")
    shown(tmp_path, *words, "--drop", "opt_state/**", "--drop", "step")


def with_more(tmp_path, *names):
    """A Llama with more tensors."""
    config = hf_models.CONFIGS["llama"] | {"num_key_value_heads": 4}
    more = dict.fromkeys(names, np.ones((3, 2), "f4"))
    hf_models.write(tmp_path / "more", config, hf_models.tensors(config) | more)
    return reshard.open(tmp_path / "more")


LAYER = "model.layers.1.self_attn."


def test_a_hint_drops_what_no_output_depends_on(tmp_path):
    more = (f"{LAYER}rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "vision_tower.x.bias")
    with_more(tmp_path, *more)
    words = ["ckpt", "more", "out/1", "--map", "hf:llama-tunix"]
    drop = "--drop '**/inv_freq' --drop 'vision_tower/**'"
    told = refused(tmp_path, *words)
    assert told.endswith(f"\n\nhint: {drop} leaves these leaves out\n")
    shown(tmp_path, *words, *shlex.split(drop))


@pytest.mark.parametrize(
    "name",
    ["q_proj.bias", "q_proj.lora_A.weight", "q_proj.weight_scale", "q_norm.weight", "sinks"],
)
def test_no_hint_drops_what_an_output_may_depend_on(tmp_path, name):
    ckpt = with_more(tmp_path, LAYER + name, "model.rotary_emb.inv_freq")
    paths = [(LAYER + name).replace(".", "/"), "model/rotary_emb/inv_freq"]
    with pytest.raises(reshard.TreeMismatchError) as error:
        reshard.remap(ckpt, "hf:llama-tunix")
    problems = {f"no rule applies to {path}" for path in paths}
    assert ({*error.value.problems}, error.value.hints) == (problems, ())
    with pytest.raises(reshard.TreeMismatchError) as error:
        layout = {"layout": "linen-params", "map_file": "hf:llama-tunix"}
        reshard.to_nnx(ckpt, tunix_llama.Llama, **layout)
    assert error.value.problems == ("model: NNX has no counterpart",)
    assert not any("drop" in hint for hint in error.value.hints)


def test_doctor_proposes_maps(tmp_path, llama):
    next_steps = [
        f"next     reshard ckpt {llama} DST {option}"
        for option in (
            "--map hf:llama-tunix",
            "--map hf:llama-maxtext",
            "--map hf:llama-maxtext-unscanned",
            "--to data=1,model=8 --spec 'REGEX=AXES'",
        )
    ]
    model = "model    tensors as in Hugging Face's model: a ready map converts them"
    assert model in shown(tmp_path, "doctor", "hf").splitlines()
    assert shown(tmp_path, "doctor", "hf").splitlines()[-4:] == next_steps
    (llama / "config.json").write_text("{}")
    assert shown(tmp_path, "doctor", "hf").splitlines()[-1:] == next_steps[-1:]


def test_a_smaller_vocabulary_has_no_way_back(llama):
    made = reshard.remap(reshard.open(llama), reshard.ready_map("hf:llama-tunix", llama, vocab=40))
    tensors = load_file(llama / "model.safetensors")
    got = values(made)
    np.testing.assert_array_equal(got["lm_head/w/value"], tensors["lm_head.weight"][:40].T)
    expected = tensors["model.embed_tokens.weight"][:40]
    np.testing.assert_array_equal(got["embedder/input_embedding/value"], expected)
    rules = reshard.ready_map("hf:llama-tunix", llama, vocab=40)
    with pytest.raises(reshard.TreeMismatchError, match="a crop cannot be inverted"):
        reshard.remap(made, rules, reverse=True)


def test_padding_that_was_trained_is_not_cut_off(tmp_path, llama):
    padded = reshard.ready_map("hf:llama-tunix", llama, vocab=64)
    made = reshard.remap(reshard.open(llama), padded)
    name = ("embedder", "input_embedding", "value")
    trained = made[name].read() + 1
    reshard.save(made, tmp_path / "out")
    # TensorStore writes what training would.
    stored = reshard.open(tmp_path / "out")[name]
    writable = stored.view()
    writable.write(trained).result()
    with pytest.raises(reshard.ReshardError, match="it was padded with"):
        reshard.save(
            reshard.remap(reshard.open(tmp_path / "out"), padded, reverse=True), tmp_path / "back"
        )


def test_a_conversion_to_the_model(tmp_path):
    """The map's paths below `params`, and the attributes of a model."""
    config = hf_models.CONFIGS["llama"] | {"num_key_value_heads": 4}
    tensors = hf_models.tensors(config)
    hf_models.write(tmp_path / "hf", config, tensors)
    ckpt, model = reshard.open(tmp_path / "hf"), tunix_llama.Llama
    made = reshard.to_nnx(ckpt, model, layout="linen-params", map_file="hf:auto-tunix")
    assert_same(values(made), hf_targets.tunix(tensors, config))
    with pytest.raises(
        reshard.ArgumentError, match="a conversion to linen cannot use the map hf:auto-tunix"
    ):
        reshard.to_linen(ckpt, layout="nnx-model", map_file="hf:auto-tunix")


@pytest.mark.parametrize("given", ["name", "map"])
def test_a_conversion_of_a_tied_model_to_the_model(tmp_path, given):
    """Its tensors are all below `model`, and are Linen's no more for that."""
    config = hf_models.CONFIGS["llama"] | {"num_key_value_heads": 4, "tie_word_embeddings": True}
    tensors = hf_models.tensors(config)
    hf_models.write(tmp_path / "hf", config, tensors)
    expected = hf_targets.tunix(tensors, config)
    assert not any(name.startswith("lm_head") for name in expected)
    rules = "hf:auto-tunix"
    if given == "map":
        rules = reshard.ready_map(rules, tmp_path / "hf", to="nnx")

    def model():
        made = tunix_llama.Llama()
        del made.lm_head
        return made

    made = reshard.to_nnx(reshard.open(tmp_path / "hf"), model, map_file=rules)
    assert_same(values(made), expected)


AGREE = "outputs are known to agree only with"
THETA = f"`rope_theta` is 500000.0: {AGREE} 1000000.0"
SCALED = f"`rope_type` is 'llama3': {AGREE} 'default'"
BOTH_WAYS = f"`use_bidirectional_attention` is True: {AGREE} False"


@pytest.mark.parametrize(
    ("model", "target", "change", "told"),
    [
        ("llama", "tunix", {}, []),
        ("llama", "tunix", {"rope_theta": 500000.0}, [THETA]),
        ("llama", "tunix", {"rope_theta": 1000000}, []),
        ("llama", "tunix", {"rope_theta": None}, [THETA.replace("500000.0", "10000.0")]),
        (
            "llama",
            "tunix",
            {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0}},
            [THETA],
        ),
        ("llama", "tunix", {"rope_scaling": {"rope_type": "llama3"}}, [SCALED]),
        ("llama", "tunix", {"hidden_act": "relu"}, [f"`hidden_act` is 'relu': {AGREE} 'silu'"]),
        (
            "qwen3",
            "tunix",
            {"use_sliding_window": True, "rope_theta": 5e6},
            [
                f"`rope_theta` is 5000000.0: {AGREE} 1000000.0",
                f"`use_sliding_window` is True: {AGREE} False",
            ],
        ),
        ("llama", "maxtext", {"rope_theta": 500000.0, "hidden_act": "silu"}, []),
        (
            "qwen3",
            "maxtext",
            {"use_sliding_window": True},
            [f"`use_sliding_window` is True: {AGREE} False"],
        ),
        ("gemma3", "tunix", {"use_bidirectional_attention": True}, [BOTH_WAYS]),
        ("gemma3", "maxtext-unscanned", {"use_bidirectional_attention": True}, [BOTH_WAYS]),
        ("gemma3", "flax", {}, []),
        (
            "gemma2",
            "gemma",
            {"hidden_act": "gelu", "hidden_activation": "silu"},
            [f"`hidden_activation` is 'silu': {AGREE} 'gelu_pytorch_tanh'"],
        ),
    ],
)
def test_what_the_jax_model_ignores_is_told(tmp_path, model, target, change, told):
    config = hf_models.CONFIGS[model] | change
    hf_models.write(tmp_path / "hf", config, hf_models.tensors(config))
    name, told = f"hf:{model}-{target}", [f"hf:{model}-{target}: {text}" for text in told]
    ckpt = reshard.remap(reshard.open(tmp_path / "hf"), name)
    assert [note for note in ckpt.notes if AGREE in note] == told
    back = reshard.remap(ckpt, name, reverse=True, config=tmp_path / "hf")
    assert [note for note in back.notes if AGREE in note] == told
    assert [note for note in reshard.plan(ckpt).notes if AGREE in note] == told
    exported = plan_export(back, tmp_path / "out")
    assert [note for note in exported.notes if AGREE in note] == told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "gpt2"}, "whose `model_type` is 'gpt2'"),
        ({"num_hidden_layers": 4}, r"`\^model/layers/3/input_layernorm/weight\$`: matches no leaf"),
        ({"num_hidden_layers": 2}, "no rule applies to model/layers/2/mlp/up_proj/weight"),
        ({"tie_word_embeddings": True}, "no rule applies to lm_head/weight"),
        ({"head_dim": 4}, r"its shape is \[24, 32\], not \[24, 16\]"),
        ({"vocab_size": 47}, r"its shape is \[48, 24\], not \[47, 24\]"),
        ({"hidden_size": "24"}, "`hidden_size` is '24', not a size"),
        ({"intermediate_size": None}, "`intermediate_size` is None, not a size"),
        ({"rope_scaling": ["llama3"]}, r"`rope_scaling` is \['llama3'\], not an object"),
        ({"rope_parameters": 5}, "`rope_parameters` is 5, not an object"),
        ({"text_config": True}, "`text_config` is True, not an object"),
        ({"text_config": []}, r"`text_config` is \[\], not an object"),
        ({"query_pre_attn_scalar": [1]}, r"`query_pre_attn_scalar` is \[1\], not a number"),
        ({"query_pre_attn_scalar": True}, "`query_pre_attn_scalar` is True, not a number"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000, more than 4096"),
        ({"tie_word_embeddings": "true"}, "`tie_word_embeddings` is 'true', not true or false"),
        ({"tie_word_embeddings": 1}, "`tie_word_embeddings` is 1, not true or false"),
    ],
)
def test_another_configuration_is_refused(tmp_path, llama, change, told):
    config = hf_models.CONFIGS["llama"] | change
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(reshard.ReshardError, match=told):
        reshard.remap(reshard.open(llama), "hf:auto-tunix")


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("hf:llama-jaxformers", {}, "for this model: llama-"),
        ("hf:gemma2-tunix", {}, "no ready map `hf:gemma2-tunix` for"),
        ("hf:llama-tunix", {"scan_axis": 0}, "scan_axis has no effect"),
        ("hf:llama-maxtext-unscanned", {"scan_axis": 0}, "scan_axis has no effect"),
    ],
)
def test_arguments_that_are_refused(llama, name, given, told):
    with pytest.raises(reshard.ArgumentError, match=told):
        reshard.ready_map(name, llama, **given)


def test_what_a_project_cannot_compute_is_refused(tmp_path):
    """Tunix scales queries by the size of a head alone."""
    config = hf_models.CONFIGS["gemma2"] | {"query_pre_attn_scalar": 12}
    hf_models.write(tmp_path / "hf", config, hf_models.tensors(config))
    with pytest.raises(reshard.ArgumentError, match="query_scalar == head_dim"):
        reshard.ready_map("hf:gemma2-tunix", tmp_path / "hf")


def test_quantized_tensors_are_refused(tmp_path):
    config, tensors = hf_models.CONFIGS["gpt_oss"], {}
    for name, values in hf_models.tensors(hf_models.CONFIGS["gpt_oss"]).items():
        packed = name.endswith(("gate_up_proj", "down_proj"))
        parts = [f"{name}_blocks", f"{name}_scales"] if packed else [name]
        tensors |= {part: values.astype("uint8") if packed else values for part in parts}
    hf_models.write(tmp_path / "hf", config, tensors)
    ckpt = reshard.open(tmp_path / "hf")
    told = r"(?s)the weights are quantized\n.*/mlp/experts/gate_up_proj_scales  uint8\["
    with pytest.raises(reshard.TreeMismatchError, match=told):
        reshard.remap(ckpt, "hf:gpt_oss-maxtext")
    config = config | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(reshard.ArgumentError, match=r"(?s)is quantized.*mxfp4"):
        reshard.remap(ckpt, "hf:gpt_oss-maxtext")


PACKED = {  # dtypes of weights, and names of more tensors with theirs
    "FP8": ("float8_e4m3fn", {"weight_scale": "float32"}),
    "FP8, other formats": ("float8_e5m2", {"weight_scale_inv": "float32"}),
    "8-bit integers": ("int8", {"SCB": "float32"}),
    "4 bits in bytes": ("uint8", {"absmax": "float32"}),
    "4 bits in words": ("uint32", {"scales": "bfloat16", "biases": "bfloat16"}),
    "alone": ("int16", {}),
}


@pytest.mark.parametrize("kind", PACKED)
def test_quantized_weights_are_known_by_their_dtype(tmp_path, kind):
    """The config does not say so. Nor do scales that were dropped, or a cast."""
    dtype, more = PACKED[kind]
    config = hf_models.CONFIGS["llama"]
    tensors = hf_models.tensors(config)
    packed = [name for name in tensors if name.endswith("up_proj.weight")]
    for name in packed:
        tensors[name] = (8 * tensors[name]).astype(dtype)
        named = {name.replace("weight", key): np.ones(3).astype(d) for key, d in more.items()}
        tensors |= named
    hf_models.write(tmp_path / "hf", config, tensors)
    ckpt = reshard.open(tmp_path / "hf")
    told = tuple(f"{name.replace('.', '/')}  {dtype}[40,24]" for name in packed)
    assert "--map" not in shown(tmp_path, "doctor", "hf")
    apart = reshard.select(ckpt, drop=[f"**/{key}" for key in more])
    for source in (ckpt, apart, reshard.cast(apart, "float32")):
        for convert in (
            lambda ckpt: reshard.remap(ckpt, "hf:llama-tunix"),
            lambda ckpt: reshard.to_nnx(
                ckpt, tunix_llama.Llama, layout="linen-params", map_file="hf:llama-tunix"
            ),
        ):
            with pytest.raises(reshard.TreeMismatchError) as error:
                convert(source)
            assert error.value.summary == "hf:llama-tunix: the weights are quantized"
            assert error.value.problems == told
            (hint,) = error.value.hints
            assert hint.startswith("dequantize its tensors")


def test_quantized_weights_of_the_jax_side_are_refused(tmp_path, llama):
    made = reshard.remap(reshard.open(llama), "hf:llama-tunix")
    tree = nested((p, leaf.read()) for p, leaf in made.items()) | {
        "step": np.int32(3),
        "rngs": {"count": np.ones(1, "uint32")},
    }
    tree["layers"]["1"]["mlp"]["up_proj"]["kernel"]["value"] = np.ones((24, 40), "int8")
    ckpt = reshard.open(save_pytree(tmp_path / "out", tree))
    rules = reshard.ready_map("hf:llama-tunix", llama)
    with pytest.raises(reshard.TreeMismatchError) as error:
        reshard.remap(ckpt, rules, reverse=True)
    assert error.value.problems == ("layers/1/mlp/up_proj/kernel/value  int8[24,40]",)


def test_a_layer_without_a_pair_is_refused(tmp_path):
    config = hf_models.CONFIGS["gemma2"] | {"num_hidden_layers": 3}
    hf_models.write(tmp_path / "hf", config, hf_models.tensors(config))
    for name in ("hf:gemma2-maxtext", "hf:gemma2-maxtext-unscanned"):
        with pytest.raises(reshard.ArgumentError, match="layers % 2 == 0"):
            reshard.ready_map(name, tmp_path / "hf")


def test_arguments_of_ready_maps_need_one(tmp_path, llama):
    told = refused(tmp_path, "ckpt", "hf", "out", "--vocab", 64)
    assert "--vocab and --scan-axis require --map hf:NAME" in told


def test_the_directory_of_a_cache(tmp_path, llama):
    """As the source, `--like` and `--config`."""
    tensors = load_file(llama / "model.safetensors")
    model = hf_models.in_cache(llama, tmp_path / "hub").relative_to(tmp_path)
    words = ["--map", "hf:llama-tunix"]
    shown(tmp_path, "ckpt", model, "out", *words)
    for option in ("--like", "--config"):
        back = tmp_path / option[2:]
        shown(tmp_path, "export", "out", back, *words, "--reverse", option, model)
        assert_same(load_file(back / "model.safetensors"), tensors)
    copied = tmp_path / "like" / "config.json"
    assert json.loads(copied.read_text()) == hf_models.CONFIGS["llama"]
    assert not copied.is_symlink()
