"""Are ``unpad`` and ``sparse_head`` exact on the architectures of transformers?

Each architecture is built small, with random weights and without dropout, for each task that it has. Its batch is
padded on the right, on the left or not at all. The gradients of a plain step and of one with both algorithms are
compared. Each row says what was left out, the relative difference of the gradient, and why something was computed.
With ``--half`` all steps run under autocast to bfloat16, whose rounding differs from one order of sums to another; then
each row also has the relative differences of both to the gradient in float32.

Run: ``python benchmarks/exactness.py`` (about two minutes; ``--only bert llama`` for some; ``--device cuda``).
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from torchboost.algorithms import sparse_head_forward, unpad_forward
from torchboost.measure.stopwatch import environment


def no_dropout(*places: str) -> dict[str, float]:
    return {f"{place}_dropout": 0.0 for place in places}


WORDS, BATCH, LENGTH, FRAMES, CLASSES = 200, 4, 14, 400, 3
SIDES = ("right", "left", "none")
BODY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {**BODY, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BART = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
TEXT = ("LM", "classification", "tokens")
VISION = {"image_size": 16, "patch_size": 8, **BERT}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
WINDOWS = {"num_feat_extract_layers": 2, "conv_dim": (8, 8), "conv_kernel": (5, 3), "conv_stride": (2, 2)}

CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {**BODY, "num_key_value_heads": 2}),
    "GPT-2": ("GPT2Config", GPT),
    "GPT-NeoX": ("GPTNeoXConfig", BODY),
    "GPT-J": ("GPTJConfig", {**GPT, "rotary_dim": 4}),
    "GPT-Neo": (
        "GPTNeoConfig",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    ),
    "Qwen2": ("Qwen2Config", {**BODY, "num_key_value_heads": 2}),
    "Qwen3": ("Qwen3Config", {**BODY, "num_key_value_heads": 2, "head_dim": 8}),
    "Mistral": ("MistralConfig", {**BODY, "num_key_value_heads": 2, "sliding_window": 6}),
    "Mixtral": ("MixtralConfig", {**BODY, "num_key_value_heads": 2, **EXPERTS}),
    "Gemma": ("GemmaConfig", {**BODY, "num_key_value_heads": 2, "head_dim": 8}),
    "Gemma 2": ("Gemma2Config", {**BODY, "num_key_value_heads": 2, "head_dim": 8}),
    "Gemma 3": ("Gemma3TextConfig", {**BODY, "num_key_value_heads": 2, "head_dim": 8}),
    "Phi": ("PhiConfig", {**BODY, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Phi-3": ("Phi3Config", {**BODY, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "OPT": ("OPTConfig", {**BODY, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "OLMo 2": ("Olmo2Config", BODY),
    "Cohere": ("CohereConfig", BODY),
    "StarCoder 2": ("Starcoder2Config", {**BODY, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "SmolLM 3": ("SmolLM3Config", BODY),
    "Granite": ("GraniteConfig", BODY),
    "StableLM": ("StableLmConfig", {**BODY, "num_key_value_heads": 4}),
    "Bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, **no_dropout("hidden", "attention")}),
    "MPT": ("MptConfig", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    "Falcon": ("FalconConfig", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "Mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2}),
    "RWKV": ("RwkvConfig", {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}),
    "BERT": ("BertConfig", BERT),
    "RoBERTa": ("RobertaConfig", BERT),
    "DistilBERT": (
        "DistilBertConfig",
        {
            **{"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
            **{"dropout": 0.0, **no_dropout("attention", "seq_classif")},
        },
    ),
    "ALBERT": ("AlbertConfig", {**BERT, "embedding_size": 16, "classifier_dropout_prob": 0.0}),
    "ELECTRA": ("ElectraConfig", {**BERT, "embedding_size": 16}),
    "DeBERTa v2": ("DebertaV2Config", BERT),
    "XLM-R": ("XLMRobertaConfig", BERT),
    "CamemBERT": ("CamembertConfig", BERT),
    "MPNet": ("MPNetConfig", BERT),
    "ModernBERT": (
        "ModernBertConfig",
        {**BODY, "global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "BigBird": ("BigBirdConfig", BERT),
    "Longformer": ("LongformerConfig", {**BERT, "attention_window": 4}),
    "FNet": ("FNetConfig", {**BODY, "hidden_dropout_prob": 0.0}),
    "LayoutLM": ("LayoutLMConfig", BERT),
    "XLNet": ("XLNetConfig", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "dropout": 0.0}),
    "T5": ("T5Config", T5),
    "mT5": ("MT5Config", T5),
    "BART": ("BartConfig", BART),
    "mBART": ("MBartConfig", BART),
    "Pegasus": ("PegasusConfig", BART),
    "Marian": ("MarianConfig", BART),
    "Whisper": ("WhisperConfig", {**BART, "num_mel_bins": 8, "max_source_positions": 200}),
    "ViT": ("ViTConfig", VISION),
    "CLIP": ("CLIPTextConfig", {**BODY}),
    "Wav2Vec2": (
        "Wav2Vec2Config",
        {
            **BODY,
            **WINDOWS,
            **no_dropout("hidden", "attention", "feat_proj", "activation", "final"),
            "layerdrop": 0.0,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
        },
    ),
}
"""Architecture -> the configuration class and its settings."""

AUTO = {
    "LM": ("AutoModelForCausalLM", "AutoModelForMaskedLM"),
    "sequences": ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"),
    "classification": ("AutoModelForSequenceClassification", "AutoModelForImageClassification"),
    "tokens": ("AutoModelForTokenClassification",),
    "features": ("AutoModel",),
    "CTC": ("AutoModelForCTC",),
}


class Row(NamedTuple):
    """One step of one architecture, task and kind of padding."""

    architecture: str
    task: str
    padding: str
    left_out: list[str]
    gradient: float
    reason: str
    rounding: tuple[float, float] | None = None


class Place(NamedTuple):
    """The device of the steps, and whether they run under autocast to bfloat16."""

    device: torch.device
    half: bool = False


def config_of(name: str) -> Any:
    kind, settings = CONFIGS[name]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    common = {"vocab_size": WORDS, "num_labels": CLASSES, **special}
    return getattr(transformers, kind)(**{**common, **settings})


def tasks_of(config: Any) -> list[str]:
    if config.model_type in ("whisper", "t5", "mt5", "bart", "mbart", "pegasus", "marian"):
        return ["sequences"]
    if config.model_type == "wav2vec2":
        return ["CTC"]
    if config.model_type == "vit":
        return ["classification"]
    return ["features"] if config.model_type == "clip_text_model" else list(TEXT)


def built(config: Any, task: str) -> nn.Module | None:
    for kind in AUTO[task]:
        try:
            torch.manual_seed(0)
            model = getattr(transformers, kind).from_config(config).train()
        except ValueError:  # this architecture has no model for the task
            continue
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model
    return None


def batch(config: Any, task: str, side: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 7, 9, LENGTH]) if side != "none" else torch.full((BATCH,), LENGTH)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(5, WORDS, mask.shape, generator=generator) * mask
    inputs = {"input_ids": ids, "attention_mask": mask}
    if config.model_type == "vit":
        inputs = {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator)}
    if config.model_type == "whisper":
        inputs = {"input_features": torch.randn(BATCH, 8, FRAMES, generator=generator)}
    if config.model_type == "wav2vec2":
        frames = (torch.arange(FRAMES) < (lengths * FRAMES // LENGTH)[:, None]).long()
        inputs = {"input_values": torch.randn(BATCH, FRAMES, generator=generator), "attention_mask": frames}
    if task == "LM":
        labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape, generator=generator) < 0.5), -100)
        if side == "left":
            labels[torch.arange(BATCH), LENGTH - lengths] = -100  # predicted from padding
        inputs["labels"] = labels
    if task == "tokens":
        inputs["labels"] = torch.randint(0, CLASSES, ids.shape, generator=generator).masked_fill(mask == 0, -100)
    if task == "classification":
        inputs["labels"] = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    if task in ("sequences", "CTC"):
        labels = torch.randint(5, WORDS, (BATCH, 10), generator=generator)
        inputs["labels"] = labels.masked_fill(torch.arange(10) >= lengths[:, None].clamp(max=10), -100)
    return inputs


def gradient(model: nn.Module, inputs: dict[str, Tensor], place: Place) -> Tensor:
    with torch.autocast(place.device.type, torch.bfloat16, enabled=place.half):
        outputs = model(**inputs)
    loss = getattr(outputs, "loss", None)
    (outputs.pooler_output.square().sum() if loss is None else loss).backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([part.flatten() for part in parts]).double()


def compared(name: str, task: str, side: str, place: Place) -> Row | None:
    config = config_of(name)
    model = built(config, task)
    if model is None:
        return None
    model.to(place.device)
    inputs = {key: value.to(place.device) for key, value in batch(config, task, side).items()}
    full = gradient(model, inputs, Place(place.device))
    try:
        plain = gradient(model, inputs, place)
    except RuntimeError as error:  # no kernel for bfloat16, such as that of cuFFT
        print(f"{name}: the plain step fails: {error}", flush=True)
        return None
    again = gradient(model, inputs, place)
    if not torch.allclose(plain, again, rtol=1e-4, atol=1e-2 * float(plain.abs().max()) if place.half else 1e-7):
        raise RuntimeError(f"{name}: two plain passes differ")
    with unpad_forward(model) as padding, sparse_head_forward(model) as head:
        gradient(model, inputs, place)  # the first call computes everything
        own = gradient(model, inputs, place)
    has_head = task in ("LM", "sequences")
    parts = {"padding": padding, **({"head": head} if has_head else {})}
    on = [what for what, live in parts.items() if live.calls and not live.remark]
    reasons = dict.fromkeys(live.remark for live in parts.values() if live.remark)
    rounding = (apart(own, full), apart(plain, full)) if place.half else None
    return Row(name, task, side, on, apart(own, plain), "; ".join(reasons), rounding)


def apart(own: Tensor, other: Tensor) -> float:
    return float((own - other).norm() / other.norm())


def rows(names: list[str], place: Place) -> Iterator[Row]:
    for name in names:
        for task in tasks_of(config_of(name)):
            for side in SIDES if CONFIGS[name][0] not in ("ViTConfig", "WhisperConfig") else ("none",):
                row = compared(name, task, side, place)
                if row is not None:
                    yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(CONFIGS), help="Names of architectures.")
    parser.add_argument("--out", type=Path, help="File for the result.")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="Default: the CPU.")
    parser.add_argument("--half", action="store_true", help="Autocast to bfloat16.")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    results = []
    for row in rows(options.only, Place(options.device, options.half)):
        results.append(row._asdict())
        step = f"{row.architecture:12} {row.task:14} {row.padding:6}"
        half = "" if row.rounding is None else " ({:.0e}, plain {:.0e} from float32)".format(*row.rounding)
        print(f"{step} {row.gradient:.0e}{half} {','.join(row.left_out):13} {row.reason}", flush=True)
    worst = max(row["gradient"] for row in results)
    print(f"{len(results)} steps, the largest difference of a gradient is {worst:.0e}")
    if options.out is not None:
        options.out.write_text(
            json.dumps({"environment": environment(options.device).model_dump(), "rows": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
