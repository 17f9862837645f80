# SPDX-License-Identifier: Apache-2.0
"""The store, where programs for Mooncake import it from."""

from sluice.mooncake.store import (
    BufferHandle,
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicateConfig,
    SoftPinAction,
)

__all__ = ["BufferHandle", "MooncakeDistributedStore", "MooncakeHostMemAllocator",
           "ObjectDataType", "ReplicaDescriptor", "ReplicateConfig", "SoftPinAction"]
