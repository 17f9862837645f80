// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// job is a batch under way. Jobs are made at the start and reused, with the memory of their lists. All is guarded by
// books.Mu.
type job struct {
	ownfiles.Job[extent]

	items []item // of descriptors, in their order

	at     cursor // what the next request begins with
	flying int    // requests
	queued bool   // in Backend.queue
}

// cursor is a place in the items of a job.
type cursor struct {
	item int
	off  uint64 // within the item
}

// item is a descriptor.
type item struct {
	local, remote, n uint64
	view             uint32
}

// set takes a list, whose memory is the caller's.
func (j *job) set(descs []driver.Desc) {
	j.items = j.items[:0]
	view := uint32(0)
	for i := range descs {
		d := &descs[i]
		for !j.Views[view].Shows(d) {
			view++
		}
		j.items = append(j.items, item{d.Local, d.Remote, d.Len, view})
	}
}
