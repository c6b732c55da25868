"""One config.json is one `ModelConfig`, whichever transformers wrote it and whichever is installed.

`tests/support/written_configs.json` has what four versions of transformers write for one small model of each family: the fields
that all of them write ("all"), and those of each version.
"""

import json
import sys
from pathlib import Path

import pytest

from jkv.checkpoints.architectures import parse_config
from jkv.model.params import RopeScaling

WRITTEN = json.loads((Path(__file__).parents[1] / "support" / "written_configs.json").read_text())
NEWEST = "5.24.0"
CASES = [(model, version) for model, versions in WRITTEN.items() for version in versions if version != "all"]


def config_of(model, version):
    return parse_config(WRITTEN[model]["all"] | WRITTEN[model][version], f"{model} of {version}")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("model", "version"), CASES)
def test_every_version_writes_the_same_model(model, version):
    assert config_of(model, version) == config_of(model, NEWEST)


@pytest.mark.parametrize("version", [version for model, version in CASES if model == "olmo3"])
def test_yarn_of_olmo_applies_to_layers_with_full_attention(version):
    """As in version 4 of transformers and in 5.24; versions between them wrote one object, and applied it to all layers."""
    config = config_of("olmo3", version)
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("yarn", 8.0)
    assert (config.window_scaling, config.window_layers) == (RopeScaling(), (0, 1, 2))
    assert config.in_windows.rope_theta == config.rope_theta == 500_000


@pytest.mark.parametrize("version", [version for model, version in CASES if model == "gemma3_text"])
def test_gemma_3_has_a_base_for_each_kind_of_layer(version):
    config = config_of("gemma3_text", version)
    assert (config.rope_theta, config.window_theta) == (1e6, 1e4)
    assert (config.rope_scaling, config.window_scaling) == (RopeScaling("linear", 8.0), RopeScaling())


def test_no_config_of_transformers_is_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails
    assert {config_of(model, NEWEST).family for model in WRITTEN} > {"llama", "gemma4_text"}


def test_null_beside_the_kinds_of_rope_says_nothing_and_a_base_there_is_refused():
    """Versions 5.0 to 5.12 add both where a model has layers of one kind alone."""
    fields = WRITTEN["gemma3_text"]["all"] | WRITTEN["gemma3_text"]["5.12.1"]
    rope = fields["rope_parameters"]
    added = fields | {"rope_parameters": rope | {"rope_type": "default", "rope_theta": None}}
    assert parse_config(added, "config.json") == parse_config(fields, "config.json")
    with pytest.raises(ValueError, match="must have an object for full_attention"):
        parse_config(fields | {"rope_parameters": rope | {"rope_theta": 1e6}}, "config.json")
