"""How a classification head is read from a config and weights, and how logits become values."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.models.architecture.registry import FAMILIES, has_classifier
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.classification_head import ClassificationHead, head_of_tokens, read_head
from penstock.models.checkpoint.info import HeadActivation
from penstock.models.errors import ModelError

NONE, SIGMOID, SOFTMAX = HeadActivation.NONE, HeadActivation.SIGMOID, HeadActivation.SOFTMAX
CONFIG = {"num_hidden_layers": 1, "pad_token_id": 3, "id2label": {0: "bad", 1: "fine", 2: "good"}}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, build_model: Any) -> Path:
    path = tmp_path_factory.mktemp("classifier")
    build_model(path, "LlamaConfig", CONFIG, head="SequenceClassification")
    return path


@pytest.fixture
def model(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    for file in built.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def classifier(path: Path, weights: bool = True) -> Any:
    found = check_checkpoint(path, weights).classifier
    assert found is not None
    return found


def change_weights(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """None removes a tensor."""
    tensors: dict[str, Any] = load_file(path / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


class TestFiles:
    def test_labels_weights_and_padding(self, model: Path) -> None:
        info = classifier(model)
        assert (info.labels, info.activation, info.pad_token_id) == (("bad", "fine", "good"), SOFTMAX, 3)
        head = read_head(info, 64)
        stored = load_file(model / "model.safetensors")["score.weight"].numpy()
        assert (head.weight == stored).all()
        assert head.bias.tolist() == [0, 0, 0]

    def test_every_float_dtype_and_a_bias(self, model: Path) -> None:
        weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
            bias = weight[:, 0].to(dtype).contiguous()
            change_weights(model, {"score.weight": weight.to(dtype), "score.bias": bias})
            head = read_head(classifier(model), 64)
            assert (head.weight == weight.to(dtype).float().numpy()).all()
            assert (head.bias == head.weight[:, 0]).all()

    def test_an_output_head_is_ignored(self, model: Path) -> None:
        change_weights(model, {"lm_head.weight": torch.zeros(160, 64)})
        info = check_checkpoint(model)
        assert "lm_head.weight" not in info.tensors
        assert info.spec.tied_embeddings

    def test_without_weights_they_are_0(self, model: Path) -> None:
        (model / "model.safetensors").unlink()
        head = read_head(classifier(model, weights=False), 64)
        assert head.weight.shape == (3, 64)
        assert not head.weight.any()

    @pytest.mark.parametrize(
        ("changes", "names"),
        [
            ({"id2label": {"0": "a", "1": "b"}}, ["score.weight", "[3, 64]", "[2, 64]", "2 labels in id2label"]),
            ({"id2label": {"0": "a", "2": "b"}}, ["config.json", "id2label", "from 0 to 1"]),
            ({"id2label": {"0": 7}}, ["id2label"]),
            ({"id2label": {}}, ["id2label", "1 to 4,096"]),
            ({"id2label": [1]}, ["id2label"]),
            ({"id2label": ..., "num_labels": 1 << 30}, ["num_labels"]),
            ({"problem_type": "guess"}, ["problem_type", "regression"]),
            ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, ["activation_fn", "Sigmoid"]),
            ({"sentence_transformers": 7}, ["sentence_transformers"]),
        ],
        ids=str,
    )
    def test_a_wrong_config_is_refused_by_its_field(
        self, model: Path, edit_config: Any, changes: dict[str, Any], names: list[str]
    ) -> None:
        edit_config(model, **changes)
        with pytest.raises(ModelError) as refusal:
            check_checkpoint(model)
        assert all(name in str(refusal.value) for name in names), refusal.value

    @pytest.mark.parametrize(
        ("weights", "names"),
        [
            ({"score.weight": None}, ["score.weight, is missing"]),
            ({"score.weight": torch.zeros(3, 32)}, ["score.weight", "[3, 32]", "[3, 64]"]),
            ({"score.bias": torch.zeros(2)}, ["score.bias", "[2]"]),
            ({"score.weight": torch.zeros(3, 64, dtype=torch.int8)}, ["score.weight", "I8"]),
            ({"classifier.weight": torch.zeros(3, 64)}, ["classifier.weight has no place"]),
        ],
        ids=str,
    )
    def test_a_wrong_head_is_refused_by_its_tensor(
        self, model: Path, weights: dict[str, Any], names: list[str]
    ) -> None:
        change_weights(model, weights)
        with pytest.raises(ModelError) as refusal:
            check_checkpoint(model)
        assert all(name in str(refusal.value) for name in names), refusal.value

    def test_weights_that_are_not_finite(self, model: Path) -> None:
        change_weights(model, {"score.weight": torch.full((3, 64), torch.nan)})
        with pytest.raises(ModelError, match=r"score\.weight has a value that is not a finite number"):
            read_head(classifier(model), 64)

    def test_the_head_of_tokens_needs_an_output_head(self, model: Path, tiny_model: Any) -> None:
        for path, problem in ((model, "a classification head of its own"), (tiny_model("gemma2").path, "capped")):
            with pytest.raises(ModelError, match=f"--score-tokens: .*{problem}"):
                head_of_tokens(check_checkpoint(path), (1, 2), ("no", "yes"))
        with pytest.raises(ModelError, match="--score-tokens: needs the rows"):
            head_of_tokens(check_checkpoint(tiny_model("llama").path, weights=False), (1, 2), ("no", "yes"))


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({}, SOFTMAX),
        ({"num_labels": 1}, SIGMOID),
        ({"num_labels": 1, "problem_type": "regression"}, NONE),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, SIGMOID),
        ({"problem_type": "multi_label_classification"}, SIGMOID),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, NONE),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, SIGMOID),
    ],
    ids=str,
)
def test_the_activation_function(model: Path, edit_config: Any, config: dict[str, Any], activation: Any) -> None:
    edit_config(model, id2label=..., **config)
    info = classifier(model, weights=False)
    assert info.activation is activation
    assert info.labels == tuple(f"LABEL_{index}" for index in range(config.get("num_labels", 2)))


@pytest.mark.parametrize(
    ("architecture", "is_classifier"),
    [
        ("LlamaForSequenceClassification", True),
        ("Gemma3TextForSequenceClassification", True),
        ("Gemma3ForSequenceClassification", True),
        ("GPT2ForSequenceClassification", True),
        ("LlamaForCausalLM", False),
        ("Qwen3Model", False),
        ("BertForSequenceClassification", False),
        ("Qwen3ForTokenClassification", False),
    ],
)
def test_architectures(architecture: str, is_classifier: bool) -> None:
    assert has_classifier({"architectures": [architecture]}) is is_classifier


def test_padding_is_by_default_that_of_transformers() -> None:
    """Files leave it out if it is the default of the config's class."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    from penstock.models.checkpoint import classification_head

    text = {
        "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
        "GPT2ForSequenceClassification": "GPT2LMHeadModel",
    }
    found: dict[str, int] = {}
    for model_type, name in CLASSES.items():
        family = text.get(name, name.replace("ForSequenceClassification", "ForCausalLM"))
        if family in FAMILIES and name != "Gemma3ForSequenceClassification":
            pad = transformers.CONFIG_MAPPING[model_type]().get_text_config().pad_token_id
            found |= {family: pad} if pad is not None else {}
    assert found == classification_head._DEFAULT_PAD


class TestValues:
    def head(self, activation: HeadActivation, num_labels: int = 3) -> ClassificationHead:
        rows = np.eye(num_labels, 8, dtype=np.float32)
        bias = np.arange(num_labels, dtype=np.float32)
        return ClassificationHead(rows, bias, tuple("abc"[:num_labels]), activation)

    def test_logits(self) -> None:
        hidden = np.array([5, -1, 2, 9, 9, 9, 9, 9], np.float32)
        assert np.frombuffer(self.head(NONE).logits(hidden.tobytes()), np.float32).tolist() == [5, 0, 4]

    @pytest.mark.parametrize("num_labels", [2, 300])
    def test_only_small_heads_reduce_states(self, num_labels: int) -> None:
        """The event loop reduces states. A large head's product would block it."""
        rng = np.random.default_rng(1)
        weight, bias = rng.random((num_labels, 1024), np.float32), rng.random(num_labels, np.float32)
        head = ClassificationHead(weight, bias, tuple(map(str, range(num_labels))), NONE)
        state = rng.random(1024, np.float32)
        reduced = head.reduced(state.tobytes())
        assert len(reduced) == (state.nbytes if num_labels == 300 else bias.nbytes)
        assert head.values(reduced, use_activation=True) == pytest.approx((weight @ state + bias).tolist(), rel=1e-5)

    @pytest.mark.parametrize("values", [[0.5, -2.0, 3.0], [200.0, -200.0, 0.0], [1e30, -1e30, 0.0]], ids=str)
    def test_activations_equal_torchs(self, values: list[float]) -> None:
        logits = np.array(values, np.float32).tobytes()
        for activation, function in ((SIGMOID, torch.sigmoid), (SOFTMAX, lambda x: x.softmax(-1))):
            expected = function(torch.tensor(values)).tolist()
            assert self.head(activation).values(logits, use_activation=True) == pytest.approx(expected, rel=1e-6)
            assert self.head(activation).values(logits, use_activation=False) == pytest.approx(values)
        assert self.head(NONE).values(logits, use_activation=True) == pytest.approx(values)

    def test_json_has_no_numpy(self) -> None:
        json.dumps(self.head(SOFTMAX).values(np.zeros(3, np.float32).tobytes(), use_activation=True))
