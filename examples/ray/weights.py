# SPDX-License-Identifier: Apache-2.0
"""A trainer hands weights to a worker by Ray, read from memory to memory: python weights.py, with
ray, torch and sluice.
"""

import ray
import torch
from sluice.integrations.ray import SluiceTransport

ray.init(num_cpus=1, include_dashboard=False)
# Before the actors are made, and in the process that makes them.
ray.experimental.register_tensor_transport("sluice", ["cpu", "cuda"], SluiceTransport, torch.Tensor)


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Trainer:
    @ray.method(tensor_transport="sluice")
    def weights(self, step):
        return {f"layer {i}": torch.full((1024, 1024), float(step + i)) for i in range(4)}


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Worker:
    def load(self, weights):
        return {name: float(w.mean()) for name, w in weights.items()}


trainer, worker = Trainer.remote(), Worker.remote()
for step in range(2):
    print(ray.get(worker.load.remote(trainer.weights.remote(step))))

# The driver reads, too, into buffers that it has already.
ref, buffers = trainer.weights.remote(2), [torch.zeros(1024, 1024) for _ in range(4)]
ray.experimental.set_target_for_ref(ref, buffers)
ray.get(ref)
print([float(b.mean()) for b in buffers])
ray.shutdown()
