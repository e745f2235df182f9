"""Adapters written by PEFT give the outputs of PEFT in every family; the table of fields equals PEFT's fields."""

import json
import shutil

import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.model_config import Compute
from bertjax.interop import peft_adapter, pretrained
from bertjax.models import families
from bertjax.models.heads import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from bertjax.models.library_fields.tables import defaults_of
from tests.golden.make_library_fields import FOLDER, table

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
huggingface_hub = pytest.importorskip("huggingface_hub")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra_packages

SIZES = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
POSITIONS = SIZES | {"max_position_embeddings": 24}
DISTILBERT = dict(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
MODERNBERT = POSITIONS | dict(pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3)
EUROBERT = POSITIONS | dict(pad_token_id=0, bos_token_id=2, eos_token_id=3)
DEBERTA = POSITIONS | dict(
    relative_attention=True, pos_att_type=["p2c", "c2p"], share_att_key=True, position_buckets=4,
    position_biased_input=False,
)  # fmt: skip
XLNET = dict(vocab_size=40, d_model=16, n_layer=2, n_head=2, d_inner=32)
GPT2 = dict(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=24)
IDS = np.array([[2, 7, 9, 11, 30, 8, 3], [2, 8, 8, 17, 5, 39, 3]])
SEQ, TOKENS = dict(task_type="SEQ_CLS"), dict(task_type="TOKEN_CLS")


@pytest.mark.slow
@pytest.mark.parametrize("family, sizes, base, kind, rows, settings", [
    ("Bert", POSITIONS, "ForPreTraining", "ForSequenceClassification", 40, SEQ | dict(target_modules="all-linear")),
    ("Bert", POSITIONS, "ForMaskedLM", "ForTokenClassification", 47,
     TOKENS | dict(rank_pattern={"layer.1.*query": 3}, alpha_pattern={"query": 5.5}, use_rslora=True)),
    ("Bert", POSITIONS, "ForMaskedLM", "ForMaskedLM", 47, dict(target_modules=["query"])),
    ("Bert", POSITIONS, "ForMaskedLM", "Model", 47, dict(target_modules=["query", "word_embeddings"])),
    ("Bert", POSITIONS, "ForMaskedLM", "ForMultipleChoice", 40,
     dict(target_modules=["query"], modules_to_save=["classifier", "pooler"], bias="all", lora_bias=True)),
    ("XLMRoberta", POSITIONS, "Model", "ForSequenceClassification", 40,
     SEQ | dict(target_modules=["query"], bias="all")),
    ("Roberta", POSITIONS, "ForMaskedLM", "ForQuestionAnswering", 47,
     dict(task_type="QUESTION_ANS", target_modules=["query", "dense"])),
    ("DistilBert", DISTILBERT, "ForMaskedLM", "ForSequenceClassification", 47,
     SEQ | dict(target_modules=r".*\.(q_lin|lin1)", modules_to_save=["pre_classifier"])),
    ("Electra", POSITIONS | {"embedding_size": 8}, "ForMaskedLM", "ForSequenceClassification", 40, SEQ),
    ("MPNet", POSITIONS, "ForMaskedLM", "ForSequenceClassification", 47, SEQ | dict(target_modules=["q", "v", "o"])),
    ("Albert", POSITIONS | {"embedding_size": 8}, "Model", "ForSequenceClassification", 40,
     SEQ | dict(target_modules=["query", "ffn"])),
    ("MegatronBert", POSITIONS, "ForPreTraining", "ForSequenceClassification", 40,
     SEQ | dict(target_modules=["query", "dense"])),
    ("XLMRobertaXL", POSITIONS, "ForMaskedLM", "ForTokenClassification", 47,
     TOKENS | dict(target_modules=["query", "dense"])),
    ("ModernBert", MODERNBERT, "ForMaskedLM", "ForSequenceClassification", 47,
     SEQ | dict(target_modules=["Wqkv", "Wi"])),
    ("ModernBert", MODERNBERT, "Model", "ForTokenClassification", 40,
     TOKENS | dict(target_modules=["Wo"], modules_to_save=["head"])),
    ("EuroBert", EUROBERT, "ForMaskedLM", "ForTokenClassification", 40, TOKENS | dict(target_modules=["q_proj"])),
    ("NomicBert", POSITIONS, "ForMaskedLM", "ForSequenceClassification", 47,
     SEQ | dict(target_modules="all-linear", modules_to_save=["classifier", "pooler"])),
    ("Gte", POSITIONS, "ForMaskedLM", "ForTokenClassification", 47,
     TOKENS | dict(target_modules=["q_proj", "gate_proj", "down_proj"], bias="all")),
    ("Gte", POSITIONS, "ForMaskedLM", "ForMaskedLM", 40, dict(target_modules=["v_proj", "up_proj"])),
    ("JinaEmbeddingsV3", POSITIONS, "ForMaskedLM", "ForSequenceClassification", 47,
     SEQ | dict(target_modules=["k_proj", "fc1", "fc2"])),
    ("JinaEmbeddingsV3", POSITIONS, "Model", "ForQuestionAnswering", 40,
     dict(task_type="QUESTION_ANS", target_modules=["o_proj"])),
    ("Ultrabert", EUROBERT, "ForMaskedLM", "ForTokenClassification", 47, TOKENS | dict(target_modules=["q_proj"])),
    ("Ultrabert", EUROBERT, "ForMaskedLM", "ForMaskedLM", 47, dict(target_modules=["q_proj"])),
    ("Ultrabert", EUROBERT, "Model", "ForQuestionAnswering", 40,
     dict(task_type="QUESTION_ANS", target_modules=["up_proj"], modules_to_save=["qa_outputs"])),
    ("DebertaV2", DEBERTA, "ForMaskedLM", "ForSequenceClassification", 47,
     SEQ | dict(target_modules=["query_proj", "dense"], modules_to_save=["classifier", "pooler"])),
    ("DebertaV2", DEBERTA | dict(legacy=False, share_att_key=False), "ForMaskedLM", "ForTokenClassification", 40,
     TOKENS | dict(target_modules=["key_proj", "pos_query_proj"])),
    ("XLNet", XLNET, "LMHeadModel", "ForTokenClassification", 40, TOKENS | dict(target_modules=["layer_1"])),
    ("GPT2", GPT2, "LMHeadModel", "LMHeadModel", 40, dict(target_modules=["c_attn", "c_proj"])),
])  # fmt: skip
def test_an_adapter_gives_the_outputs_of_peft(family, sizes, base, kind, rows, settings, tmp_path):
    """The head of the adapter replaces the head of the base.

    `rows`: vocabulary size of the adapter; the base has 40 tokens.
    """
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{base}")(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(tmp_path / "base")
    of_class = getattr(transformers, f"{family}{kind}")
    model = of_class.from_pretrained(tmp_path / "base", attn_implementation="eager")
    if rows > 40:
        model.resize_token_embeddings(rows)
        model.get_input_embeddings().weight.data[40:].normal_(0, 0.2)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, **settings)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor(IDS[:, None] if "Choice" in kind else IDS)
    with torch.no_grad():
        outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    names = [name for name in ("logits", "start_logits", "end_logits", "last_hidden_state") if name in outputs]
    expected = np.stack([outputs[name].numpy() for name in names], -1).squeeze(-1 if len(names) == 1 else ())

    source, inputs = pretrained.read_pretrained(tmp_path / "adapter"), (IDS, np.ones_like(IDS), np.zeros_like(IDS))
    arguments, params = (source.config, Compute()), {"params": source.params}
    if "classifier" in source.params:
        cls = BertForTokenClassification if "Token" in kind else BertForSequenceClassification
        logits = cls(source.config, len(source.params["classifier"]["dense"]["bias"])).apply(params, *inputs)
    elif "spans" in source.params:
        logits = BertForQuestionAnswering(*arguments).apply(params, *inputs)
    elif kind != "Model":
        logits = BertForMaskedLM(*arguments).apply(params, *inputs, np.tile(np.arange(7), (2, 1)))[..., :rows]
    else:
        encoder = families.family_of(source.config).build(*arguments)
        logits = encoder.apply({"params": source.params["bert"]}, *inputs, method="encode")
    assert source.config.vocab_size == rows and source.ignored == []
    np.testing.assert_allclose(np.reshape(logits, expected.shape), expected, atol=2e-5)


TASKS = ("classification", "retrieval_passage", "retrieval_query", "separation", "text_matching")


@pytest.fixture(scope="module")
def jina_with_tasks(tmp_path_factory):
    """Returns a folder in the form of jinaai/jina-embeddings-v3-hf: a model, and an adapter for each task."""
    folder = tmp_path_factory.mktemp("jina") / "jina"
    torch.manual_seed(0)
    model = transformers.JinaEmbeddingsV3Model(transformers.JinaEmbeddingsV3Config(**POSITIONS))
    model.save_pretrained(folder)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "word_embeddings", "token_type_embeddings"]
    for task in TASKS:
        base = transformers.AutoModel.from_pretrained(folder)
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=1, target_modules=targets))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.3)
        adapted.save_pretrained(folder / task, save_embedding_layers=False)
        path = folder / task / "adapter_config.json"
        name = None if task == "separation" else "jinaai/jina-embeddings-v3-hf"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": name}))
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_the_adapter_of_a_task_gives_the_outputs_of_transformers(task, jina_with_tasks):
    model = transformers.AutoModel.from_pretrained(jina_with_tasks, attn_implementation="eager")
    plain = model(torch.tensor(IDS)).last_hidden_state.detach()
    # The first adapter of a model is active.
    model.load_adapter(str(jina_with_tasks), adapter_name=task, adapter_kwargs={"subfolder": task})
    with torch.no_grad():
        expected = model.eval()(torch.tensor(IDS)).last_hidden_state
    assert (expected - plain).abs().max() > 0.1
    source = pretrained.read_pretrained(jina_with_tasks / task)
    encoder = families.family_of(source.config).build(source.config, Compute())
    inputs = IDS, np.ones_like(IDS), np.zeros_like(IDS)
    states = encoder.apply({"params": source.params["bert"]}, *inputs, method="encode")
    assert source.ignored == [] and source.config.family == "jina_embeddings_v3"
    np.testing.assert_allclose(states, expected, atol=1e-4)
    states = encoder.apply(
        {"params": pretrained.read_pretrained(jina_with_tasks).params["bert"]}, *inputs, method="encode"
    )
    np.testing.assert_allclose(states, plain, atol=1e-4)


def test_an_unknown_task_and_a_missing_base_are_named_in_one_line(jina_with_tasks, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=f"no checkpoint in .*the adapters in .* are {', '.join(TASKS)}") as error:
        pretrained.read_pretrained(jina_with_tasks / "retrieval.query")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for task, message in {
        "separation": "base_model_name_or_path is None; set it to the folder of the base",
        "text_matching": "base of the adapter, base_model_name_or_path 'jinaai/jina-embeddings-v3-hf': hub:jinaai/jina",
    }.items():
        shutil.copytree(jina_with_tasks / task, tmp_path / "alone" / task)
        with pytest.raises(UserError, match=message) as error:
            pretrained.read_pretrained(tmp_path / "alone" / task)
        assert "\n" not in str(error.value)


def test_the_fields_equal_the_fields_of_peft():
    """`check_fields` refuses each field of PEFT that is not in a group."""
    assert json.loads((FOLDER / "peft.json").read_text()) == json.loads(json.dumps(table("peft")))
    groups = [*peft_adapter.READ, *peft_adapter.UNUSED_FIELDS]
    assert len({*groups}) == len(groups) and {*groups} <= defaults_of("peft", "lora").keys()
