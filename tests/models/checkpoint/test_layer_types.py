"""Which layers have a window: what config.json's layer_types says, as transformers reads it."""

import shutil

import pytest
import torch
import transformers

from penstock.models.backends.base import load_backend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError
from penstock.scheduler.plan import SamplingParams

FULL, WINDOW = "full_attention", "sliding_attention"


@pytest.fixture
def edited(tiny_model, tmp_path, edit_config):
    """A copy of a variant of three layers whose config.json was changed."""

    def make(variant, **changes):
        path = shutil.copytree(tiny_model(variant).path, tmp_path / variant)
        edit_config(path, **changes)
        return path

    return make


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("variant", "changes", "windows"),
    [
        ("mistral-window9", {"layer_types": [FULL, WINDOW, FULL]}, (None, 9, None)),
        ("mistral-window9", {"layer_types": [FULL] * 3}, (None,) * 3),
        ("mistral-window9", {"layer_types": ["attention", WINDOW, WINDOW]}, (None, 9, 9)),  # the old name of full
        ("mistral-window9", {"layer_types": None}, (9,) * 3),
        (
            "mistral-window9",
            {"model_type": "ministral", "architectures": ["MinistralForCausalLM"], "layer_types": [WINDOW, FULL, FULL]},
            (9, None, None),
        ),
        ("gemma2", {"layer_types": [FULL, FULL, WINDOW]}, None),
        ("gemma3", {"layer_types": [FULL, WINDOW, WINDOW]}, None),
        ("qwen3-tied-bias-yarn-windows", {"layer_types": [FULL, WINDOW, FULL]}, None),
        ("gpt-oss", {"layer_types": [FULL, WINDOW, WINDOW]}, None),
        # These classes of transformers ignore the field.
        ("llama", {"layer_types": [FULL, WINDOW, FULL], "sliding_window": 9}, (None,) * 3),
    ],
)
async def test_windows_are_those_of_transformers(
    edited, in_process, start_engine, prompts, request, backend, variant, changes, windows
):
    if backend == "cpu":
        request.getfixturevalue("cpu_library")
    path = edited(variant, **changes)
    if windows is not None:
        assert check_checkpoint(path).spec.windows == windows
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    prompt = prompts[-1]
    with torch.inference_mode():
        expected = oracle.eval()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    engine = await start_engine(in_process(path, backend=backend))
    [answer] = await engine.run([prompt], SamplingParams(temperature=0.0, prompt_logprobs=0), 1)
    got = [value for part in answer.prompt_logprobs for value in part.logprobs.chosen]
    chosen = expected[:-1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(got), chosen, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["llama", "mistral-window9", "gemma3", "olmo2", "qwen3-moe", "phi3-partial-rotary"])
@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        ([FULL], r"must have num_hidden_layers entries, 3; it has 1"),
        ([FULL] * 4, r"must have num_hidden_layers entries, 3; it has 4"),
        ([FULL, "chunked_attention", FULL], "must name only full_attention and sliding_attention; chunked_attention"),
        ([FULL, 5, FULL], "must be a list of strings"),
        (FULL, "must be a list of strings"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(edited, variant, kinds, says):
    with pytest.raises(ModelError, match=rf"config\.json: layer_types is .*{says}"):
        check_checkpoint(edited(variant, layer_types=kinds))


@pytest.mark.parametrize("variant", ["mistral-window9", "qwen2-tied"])
def test_windows_without_their_size_are_refused(edited, variant):
    with pytest.raises(ModelError, match=r"layer_types is .*needs sliding_window"):
        check_checkpoint(edited(variant, layer_types=[FULL, WINDOW, FULL], sliding_window=None))


@pytest.mark.parametrize(
    ("variant", "changes", "computed"),
    [
        ("llama", {"layer_types": [FULL, WINDOW, FULL], "sliding_window": 9}, "full attention"),
        ("olmo2", {"layer_types": [WINDOW] * 3}, "full attention"),
        ("phi3-partial-rotary", {"layer_types": [FULL] * 3, "sliding_window": 9}, "a window of 9"),
        ("mixtral", {"layer_types": [FULL, WINDOW, FULL], "sliding_window": 7}, "a window of 7"),
    ],
)
def test_a_list_that_has_no_effect_is_logged(edited, worker_config, caplog, variant, changes, computed):
    path = edited(variant, **changes)
    load_backend(worker_config(path))
    [record] = [record for record in caplog.records if "layer_types is ignored" in record.message]
    assert record.levelname == "WARNING"
    assert str(path / "config.json") in record.message
    assert computed in record.message


@pytest.mark.parametrize("variant", ["llama", "mistral-window9"])
def test_a_redundant_layer_type_list_is_not_logged(edited, variant):
    kinds = [FULL if variant == "llama" else WINDOW] * 3
    assert check_checkpoint(edited(variant, layer_types=kinds)).warnings == ()
