# SPDX-License-Identifier: Apache-2.0
"""Stands in for the package `mooncake`. It is on no path unless sluice.mooncake.shim puts it there.
"""
