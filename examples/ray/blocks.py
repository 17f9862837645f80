# SPDX-License-Identifier: Apache-2.0
"""Actors of Ray share KV cache by its keys, in the cache of a node or of a cluster, beside tensors
that they hand over: python blocks.py "etcd:http://127.0.0.1:2379", with ray, torch and sluice.
"""

import hashlib
import sys

import ray
import torch
from sluice.cache import Cache
from sluice.integrations.ray import SluiceTransport

LAYERS, BLOCKS, BYTES = 4, 8, 4096
ray.init(num_cpus=1, include_dashboard=False)
ray.experimental.register_tensor_transport("sluice", ["cpu", "cuda"], SluiceTransport, torch.Tensor)


def keys_of(prompt):
    """The key of a block is the hash of its tokens and of all before them."""
    return [hashlib.sha256(f"{prompt} up to block {k}".encode()).digest()[:16]
            for k in range(BLOCKS)]


class User:
    def __init__(self, address):
        self.cache = Cache.connect(address)
        self.space = self.cache.namespace("model", hashlib.sha256(b"model, layout").digest())


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Prefill(User):
    @ray.method(tensor_transport="sluice")
    def compute(self, prompt):
        kv = torch.randint(0, 256, (LAYERS, BLOCKS, BYTES), dtype=torch.uint8)
        with self.cache.attach(kv, axis=1) as blocks:
            self.space.store(keys_of(prompt), blocks, range(BLOCKS)).wait(30)
        return kv


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Decode(User):
    def keep(self, handed):
        self.handed = handed.clone()

    def load(self, prompt):
        kv = torch.zeros((LAYERS, BLOCKS, BYTES), dtype=torch.uint8)
        found = self.space.match(keys_of(prompt)).prefix
        with self.cache.attach(kv, axis=1) as blocks:
            self.space.load(keys_of(prompt)[:found], blocks, range(found)).wait(30)
        return found, torch.equal(kv, self.handed)


prefill, decode = Prefill.remote(sys.argv[1]), Decode.remote(sys.argv[1])
ray.get(decode.keep.remote(prefill.compute.remote("a prompt")))
ray.kill(prefill)  # its blocks stay in the cache
print(ray.get(decode.load.remote("a prompt")))
ray.shutdown()
