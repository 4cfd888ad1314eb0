"""Rerankers behind ``penstock serve``, over HTTP and gRPC: classes and scores equal those of transformers."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from penstock.clients import Client, RequestFailed
from penstock.models.checkpoint.checkpoint import resolve_model

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
QUERY = "Which part of a system schedules processes?"
DOCUMENTS = [f"{text} {number}" for number in range(8) for text in ("The kernel.", "A shell", "Some file of", "")]
INSTRUCTION = "Find documents that answer the query"
TEMPLATE = """<|im_start|>system
Judge whether the document answers the query.<|im_end|>
<|im_start|>user
{{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("Find answers") }}
{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
"""
"""In the form of Qwen3-Reranker's."""

Serving = Callable[..., AbstractContextManager[Any]]


def write_model(path: Path, head: str, **config: Any) -> tuple[Any, Any]:
    """Writes a random model with the demo's tokenizer. Returns both as transformers has them."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("demo") / name, path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    torch.manual_seed(5)
    described = transformers.Qwen3Config(**SMALL, vocab_size=len(tokenizer), **config)
    kind = getattr(transformers, f"AutoModelFor{head}")
    module = kind.from_config(described, attn_implementation="eager").eval()
    module.save_pretrained(path)
    return module, tokenizer


@pytest.fixture(scope="module")
def reranker(
    tmp_path_factory: pytest.TempPathFactory, start_serving: Serving, cpu_library: Path
) -> Iterator[tuple[Any, Callable[..., list[float]]]]:
    """A service, and a function for the logits of pairs by transformers."""
    path = tmp_path_factory.mktemp("reranker")
    module, tokenizer = write_model(path, "SequenceClassification", num_labels=1, id2label={0: "relevant"})

    def logits(query: str, documents: list[str]) -> list[float]:
        with torch.inference_mode():
            return [module(**tokenizer(query, each, return_tensors="pt")).logits[0, 0].item() for each in documents]

    with start_serving(str(path), "--backend=cpu", "--dtype=float32", "--served-model-name=reranker") as served:
        yield served, logits


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_rerank_and_score_equal_transformers(reranker: Any, size: int) -> None:
    """At every number of documents, over HTTP and gRPC, and again with the prefixes in the cache."""
    served, logits = reranker
    documents = [each or "nothing" for each in DOCUMENTS[:size]]
    scores = torch.tensor(logits(QUERY, documents)).sigmoid().tolist()
    with httpx.Client(base_url=served.http, timeout=120) as http, Client(served.target) as client:
        for _ in range(2):
            body = {"model": "reranker", "query": QUERY, "documents": documents}
            results = http.post("/v1/rerank", json=body).json()["results"]
            assert sorted(each["index"] for each in results) == list(range(size))
            found = [each["relevance_score"] for each in results]
            assert found == sorted(found, reverse=True)
            assert found == pytest.approx([scores[each["index"]] for each in results], abs=2e-5)
            assert [each["document"]["text"] for each in results] == [documents[each["index"]] for each in results]
            answer = http.post("/v1/score", json={"text_1": QUERY, "text_2": documents}).json()
            assert [each["score"] for each in answer["data"]] == pytest.approx(scores, abs=2e-5)
            assert client.score(QUERY, documents).scores == pytest.approx(scores, abs=2e-5)


def test_classes_and_pairs_of_their_own(reranker: Any) -> None:
    served, logits = reranker
    with Client(served.target) as client:
        scores = client.score(["a query", "another"], ["one", "other"], use_activation=False)
        assert scores.scores == pytest.approx(logits("a query", ["one"]) + logits("another", ["other"]), abs=2e-4)
        classes = client.classify(["a query" + "one"], use_activation=False)
        assert classes.labels == ["relevant"]
        assert classes.usage.prompt_tokens
        described = client.model()
        assert list(described.labels) == ["relevant"]
        assert {"scoring", "classification", "embeddings"} <= {*described.features}
        with pytest.raises(RequestFailed, match="has a classification head and generates nothing"):
            client.complete("Once upon a time")


def test_a_reranker_with_an_output_head(tmp_path: Path, start_serving: Serving, cpu_library: Path) -> None:
    """As Qwen3-Reranker is published: the probability of one token against another, after a template."""
    module, tokenizer = write_model(tmp_path, "CausalLM", tie_word_embeddings=True)
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    no, yes = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "b"))
    flags = ("--backend=cpu", "--dtype=float32", "--score-tokens=a,b", f"--chat-template={template}")

    def score(document: str, instruction: str | None) -> float:
        messages = [] if instruction is None else [{"role": "system", "content": instruction}]
        messages += [{"role": "query", "content": QUERY}, {"role": "document", "content": document}]
        ids = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, return_tensors="pt", return_dict=False)
        with torch.inference_mode():
            chance: float = module(ids).logits[0, -1, [no, yes]].softmax(-1)[1].item()
        return chance

    documents = DOCUMENTS[:7]
    with start_serving(str(tmp_path), *flags) as served, Client(served.target) as client:
        for instruction in (None, INSTRUCTION):
            expected = [score(each, instruction) for each in documents if each]
            found = client.score(QUERY, [each for each in documents if each], instruction=instruction).scores
            assert found == pytest.approx(expected, abs=2e-5)
        assert client.complete("Once", max_tokens=2).token_ids
