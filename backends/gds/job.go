// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// job is a batch under way. Jobs are made at the start and reused, with the memory of their lists.
// All is guarded by flights.Mu.
type job struct {
	ownfiles.Job[extent]
}

type cursor = ownfiles.Cursor
