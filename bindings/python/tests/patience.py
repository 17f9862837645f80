# SPDX-License-Identifier: Apache-2.0
"""Has the engines and agents of this process wait for longer than a busy machine stands still."""

from __future__ import annotations

from typing import Any

import sluice
from sluice import _callers
from sluice.mooncake import handshake
from sluice.nixl import listening, meeting

LIMIT = 60.0

_open: Any = sluice.Engine.__init__
_open.__kwdefaults__.update(connect_timeout=LIMIT, handshake_timeout=LIMIT)
_callers.LIMIT = handshake._WHOLE = listening._WHOLE = meeting._MOMENT = LIMIT
