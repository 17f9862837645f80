# SPDX-License-Identifier: Apache-2.0
"""A small Llama with made weights, on processors: what examples compute the first token with, from
all of a prompt, or from the KV cache of it and its last token. It takes torch and transformers.
"""

import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, DIM, TOKENS = 4, 4, 32, 256  # tokens of a chunk
CHUNK = LAYERS * 2 * HEADS * TOKENS * DIM * 4  # bytes: keys and values of all layers in float32


class Prompt:
    """A prompt of some chunks, and one token more."""

    def __init__(self, chunks):
        torch.manual_seed(7)
        self.model = LlamaForCausalLM(LlamaConfig(
            vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=LAYERS,
            num_attention_heads=8, num_key_value_heads=HEADS,
            max_position_embeddings=2 * TOKENS * chunks)).eval()
        self.ids = torch.randint(3, 4096, (1, chunks * TOKENS + 1))
        self._run(self.ids[:, :8], DynamicCache())  # a first call is not measured

    @torch.inference_mode()
    def _run(self, ids, cache):
        return int(self.model(input_ids=ids, past_key_values=cache).logits[0, -1].argmax())

    def compute(self, memory):
        """The first token, and the seconds that it took; leaves the KV cache in the memory, a
        tensor of CHUNK bytes for each chunk.
        """
        cache, begin = DynamicCache(), time.perf_counter()
        token = self._run(self.ids, cache)
        seconds = time.perf_counter() - begin
        for layer in range(LAYERS):
            for kind, whole in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
                for k, chunk in enumerate(memory):
                    _rows(chunk)[layer, kind] = whole[0, :, k * TOKENS:(k + 1) * TOKENS]
        return token, seconds

    def resume(self, memory):
        """The first token from the KV cache in the memory."""
        cache, rows = DynamicCache(), [_rows(chunk) for chunk in memory]
        for layer in range(LAYERS):
            keys, values = (torch.cat([row[layer, kind] for row in rows], 1)[None]
                            for kind in range(2))
            cache.update(keys, values, layer)
        return self._run(self.ids[:, -1:], cache)


def _rows(chunk):
    return chunk.view(torch.float32).view(LAYERS, 2, HEADS, TOKENS, DIM)
