# SPDX-License-Identifier: Apache-2.0
"""sluice where other systems have an official place for it. Each module needs the system that it is
named after.
"""
