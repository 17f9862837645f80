// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// job is a batch under way. Jobs are made at the start and reused, with the memory of their lists. All is guarded by
// books.Mu.
type job struct {
	ownfiles.Job[extent]

	at     cursor // what the next request begins with
	flying int    // requests
	queued bool   // in Backend.queue
}

// cursor is a place in the items of a job.
type cursor struct {
	item int
	off  uint64 // within the item
}
