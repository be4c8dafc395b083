"""A map makes another tree without a model; what its rules compute, compared with NumPy."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
from in_process import refused, shown
from layouts import save_pytree
from safetensors.numpy import save_file
from test_imports import FRAMEWORKS, loaded_after

import reshard

STACKS = "".join(
    rf"""
[[rule]]
from = '^model/layers/(\d+)/mlp/{name}/weight$'
transpose = [1, 0]
stack = {{ axis = 1, by = 1 }}
to = 'params/layers/{name}/kernel'
"""
    for name in ("up", "gate")
)
STACKS += """
[[rule]]
from = '^model/norm/weight$'
to = 'params/norm/scale'
"""


def map_of(folder, text):
    (folder / "map.toml").write_text(text)
    return folder / "map.toml"


def opened(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    return reshard.open(folder / "model.safetensors")


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    made = {
        f"model.layers.{n}.mlp.{name}.weight": rng.standard_normal((5, 3)).astype("f4")
        for n in range(11)
        for name in ("up", "gate")
    }
    return made | {"model.norm.weight": rng.standard_normal(3).astype("f4")}


def values(ckpt):
    return {"/".join(map(str, a.path)): a.rounded(a.view().read().result()) for a in ckpt.arrays}


def test_a_map_makes_another_tree_and_back(tmp_path, weights):
    opened(tmp_path, weights)
    source, file = tmp_path / "model.safetensors", map_of(tmp_path, STACKS)
    shown(tmp_path, "ckpt", source, tmp_path / "out", "--map", file)
    stacked = {
        name: np.stack([weights[f"model.layers.{n}.mlp.{name}.weight"].T for n in range(11)], 1)
        for name in ("up", "gate")
    }
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "out")
    assert set(found) == {"params"}
    assert set(found["params"]) == {"layers", "norm"}
    for name, expected in stacked.items():
        np.testing.assert_array_equal(found["params"]["layers"][name]["kernel"], expected)
    np.testing.assert_array_equal(found["params"]["norm"]["scale"], weights["model.norm.weight"])
    shown(tmp_path, "ckpt", tmp_path / "out", tmp_path / "back", "--map", file, "--reverse")
    back = values(reshard.open(tmp_path / "back"))
    assert back.keys() == {name.replace(".", "/") for name in weights}
    for name, expected in weights.items():
        np.testing.assert_array_equal(back[name.replace(".", "/")], expected)


def test_all_problems_are_told_at_once(tmp_path, weights):
    weights |= {"lm_head.weight": np.zeros(3, "f4"), "rotary.freq": np.zeros(3, "f4")}
    ckpt = opened(tmp_path, weights)
    file = map_of(tmp_path, STACKS + "[[rule]]\nfrom = '^no/such$'\nto = 'a'\n")
    with pytest.raises(reshard.TreeMismatchError) as error:
        reshard.remap(ckpt, file)
    assert error.value.problems == (
        "rule 4, `^no/such$`: matches no leaf",
        "no rule applies to lm_head/weight",
        "no rule applies to rotary/freq",
    )


def test_only_a_model_has_initial_values(tmp_path, weights):
    file = map_of(tmp_path, "init = ['params/bias']\n" + STACKS)
    told = "`init` has `params/bias`, and only a model has initial values"
    with pytest.raises(reshard.TreeMismatchError, match=told):
        reshard.remap(opened(tmp_path, weights), file)


def test_leaves_are_kept_by_name_and_lists_stay_lists(tmp_path):
    tree = {"params": {"w": np.ones(3)}, "opt": [np.zeros(2), {"mu": np.ones(2)}], "note": "text"}
    ckpt = reshard.open(save_pytree(tmp_path / "saved", tree))
    file = map_of(tmp_path, "[[rule]]\nfrom='^(opt|note)(.*)$'\nto='\\1\\2'\n[[rule]]\n"
                  "from='^params/w$'\nto='model/w'")  # fmt: skip
    made = reshard.remap(ckpt, file)
    assert {*made} == {("model", "w"), ("opt", 0), ("opt", 1, "mu"), ("note",)}
    assert made["note"] == "text"


def test_operations_on_leaves_that_are_no_arrays_are_refused(tmp_path):
    ckpt = reshard.open(
        save_pytree(tmp_path / "saved", {"a": "text", "b": "other", "c": np.ones(1)})
    )
    text = "[[rule]]\nfrom=['^a$', '^b$']\nstack={axis=0}\nto='d'\n[[rule]]\nfrom='^c$'\nto='c'"
    told = r"a: Stack\(.*\) is for arrays, not for string"
    with pytest.raises(reshard.TreeMismatchError, match=told):
        reshard.remap(ckpt, map_of(tmp_path, text))


def test_neither_flax_nor_jax_is_imported(tmp_path, weights):
    opened(tmp_path, weights)
    source, out, file = tmp_path / "model.safetensors", tmp_path / "out", map_of(tmp_path, STACKS)
    loaded, _ = loaded_after(
        "from reshard.cli import command\n"
        f"words = ['ckpt', {str(source)!r}, {str(out)!r}, '--map', {str(file)!r}, '--quiet']\n"
        "command(words, standalone_mode=False)"
    )
    assert loaded & FRAMEWORKS == set()
    assert len(reshard.open(out)) == 3


def test_reverse_needs_a_map(tmp_path, weights):
    opened(tmp_path, weights)
    told = refused(tmp_path, "ckpt", "model.safetensors", "out", "--reverse")
    assert "--reverse requires --map FILE" in told
