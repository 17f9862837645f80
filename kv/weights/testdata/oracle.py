# SPDX-License-Identifier: Apache-2.0
"""Says for each file that is named on stdin what safetensors itself reads, as a line of JSON."""

import json
import sys

from safetensors import safe_open

for line in sys.stdin:
    try:
        with safe_open(line.rstrip("\n"), framework="numpy") as f:
            tensors = {}
            for name in f.keys():
                part = f.get_slice(name)
                tensors[name] = [part.get_dtype(), part.get_shape()]
            said = {"tensors": tensors, "metadata": f.metadata() or {}}
    except Exception as e:
        said = {"error": f"{type(e).__name__}: {e}"}
    print(json.dumps(said), flush=True)
