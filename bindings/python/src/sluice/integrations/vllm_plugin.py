# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins` of our wheel:
it makes the backend "sluice" of weight transfer known, and imports nothing that is not used. With
SLUICE_VLLM_RING=1 it puts our ring in place of vLLM's (vllm_ring.py).
"""

import os


def register() -> None:
    if os.environ.get("SLUICE_VLLM_RING") == "1":
        from .vllm_ring import install

        install()
    try:
        from vllm.distributed.weight_transfer.factory import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError:  # a vLLM without the two: the backend is then unknown to it
        return
    module = "sluice.integrations.vllm_weights"
    for factory, name in ((WeightTransferEngineFactory, "SluiceWeightTransferEngine"),
                          (WeightTransferTrainerFactory, "SluiceTrainerWeightTransferEngine")):
        if "sluice" not in factory._registry:
            factory.register_engine("sluice", module, name)
