# SPDX-License-Identifier: Apache-2.0
"""A Ray of this machine alone, and two transports in one process. `hack/stacks` runs these tests.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from typing import Any, Iterator

os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
# its processes start, and answer each other, on a machine that others keep busy
os.environ.update(RAY_worker_register_timeout_seconds="300", RAY_gcs_server_port_wait_time_s="300",
                  RAY_health_check_failure_threshold="100")
# it kills our actors for the memory that other programs use
os.environ["RAY_memory_monitor_refresh_ms"] = "0"

import pytest
import ray
from sluice.integrations.ray import SluiceTransport


def pytest_configure() -> None:
    """A soak that is cut off ends its servers, which lie in sessions of their own."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="slr")  # short: sockets lie in it
    quiet: Any = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    ray.init(num_cpus=3, object_store_memory=100 << 20, _temp_dir=folder, **quiet)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pair() -> Iterator[Any]:
    made = SluiceTransport(), SluiceTransport()
    yield made
    for transport in made:
        transport.engine().close()
