# SPDX-License-Identifier: Apache-2.0
"""The package `nixl` under the name that programs for ROCm import."""

from sluice._shims import alias

alias(__name__, "nixl", "_api", "_bindings", "_utils", "logging")
