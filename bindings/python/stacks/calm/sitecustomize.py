# SPDX-License-Identifier: Apache-2.0
"""For vLLM's processes in these tests: workers that wait for each other's messages by sched_yield
starve processes of the other server on 2 processors (seen on Linux 6.18), for as long as a lease.
Here they sleep for a moment instead.
"""

import os
import time

os.sched_yield = lambda: time.sleep(50e-6)
