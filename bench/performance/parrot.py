"""Models whose weights say what is sampled, so that both sides of a comparison sample the same number of tokens.

Nothing is put between a model and its sampler, on either side: both load one folder in the hub's format, and each token
costs the forward pass that it would cost a model that has learned something.

`parrot` says the script of `bench.performance.lookup`: its head answers each word's embedding with the word that follows, at a
probability of 1. `endless` samples almost evenly from its vocabulary and never its end.
"""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from agentrl.workflow.chat.tiny_template import TEMPLATE
from agentrl.workflow.datasets.arithmetic import arithmetic
from agentrl.workflow.models.tiny import END, save_tiny, tiny_tokenizer
from agentrl.workflow.training.supervised import demonstrations, texts_of
from bench.performance import lookup
from bench.performance.models import CONTEXT, DEMONSTRATIONS, VOCABULARY, WIDTH, ModelName, bench_model, saved

GENERATION = "<|im_start|>assistant\n"
CUED = TEMPLATE.replace(GENERATION + "{% endif", GENERATION + "{{ messages[-1].content.split() | last }}{% endif")
"""The template's generation prompt ends with the last word of what was said: the token read last decides what follows."""

SHARPNESS = 8.0
"""Norm of a row of the head: with it a scripted token's logit is some 100 above all others."""

ASIDE = 10.0
"""Of `endless`: how far all embeddings but the end's are moved in one direction, which is how far the end's logit is below."""


def parrot(folder: Path) -> Path:
    """The bench model with a head of its own (57M parameters) that says the script; makes the folder and returns it."""
    tokenizer = scripted_tokenizer()
    model = bench_model()
    model.config.tie_word_embeddings = False
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        embeddings, head = scripted_weights(tokenizer)
    model.get_input_embeddings().weight = nn.Parameter(embeddings)
    model.lm_head.weight = nn.Parameter(head)
    save_tiny(folder, model, tokenizer)
    return folder


def endless(name: ModelName, folder: Path) -> Path:
    """The tiny or the bench model, deaf to its end token; makes `folder / name` and returns it."""
    path = saved(name, folder)
    model = Qwen2ForCausalLM.from_pretrained(path)
    tokenizer = Qwen2Tokenizer.from_pretrained(path)
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings += ASIDE / embeddings.shape[1] ** 0.5
        embeddings[tokenizer.convert_tokens_to_ids(END)] = 0.0
    save_tiny(path, model, tokenizer)
    return path


def scripted_tokenizer() -> Qwen2Tokenizer:
    """The tiny model's, with a token for each word, cue and call, and the cued template."""
    tokenizer = tiny_tokenizer(texts_of(demonstrations(arithmetic, DEMONSTRATIONS, seed=0)))
    tokenizer.chat_template = CUED
    tokenizer.model_max_length = CONTEXT
    turns = [(task, turn) for task in range(lookup.TASKS) for turn in range(lookup.TURNS)]
    tokenizer.add_tokens([text for place in turns for text in (lookup.cue(*place), lookup.call(*place))])
    tokenizer.add_tokens([lookup.word(number) for number in range(VOCABULARY - len(tokenizer))])
    return tokenizer


def scripted_weights(tokenizer: Qwen2Tokenizer) -> tuple[Tensor, Tensor]:
    """Embeddings and head, each (V, WIDTH): a row of the head points to the embedding of the token before it."""
    embeddings = torch.randn(VOCABULARY, WIDTH)
    head = torch.randn(VOCABULARY, WIDTH) * 0.02
    ids = tokenizer.get_vocab()
    last = embeddings[0].clone()  # whatever is said last looks the same, since one token, the end, follows it
    for task in range(lookup.TASKS):
        for turn in range(lookup.TURNS):
            said = [ids[text] for text in (lookup.cue(task, turn), *lookup.script(task, turn))]
            embeddings[said[-1]] = last
            for before, after in pairwise(said):
                head[after] = SHARPNESS * nn.functional.normalize(embeddings[before], dim=0)
    head[ids[END]] = SHARPNESS * nn.functional.normalize(last, dim=0)
    return embeddings, head
