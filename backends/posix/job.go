// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"cmp"
	"slices"

	"github.com/sluicehq/sluice/internal/ownfiles"
)

// job is a batch under way. Jobs are made at the start and reused, with the memory of
// their lists. All is guarded by flights.Mu.
type job struct {
	ownfiles.Job[extent] // its items rise in the file within each view

	high    uint64 // end of what was begun in the file of the view
	syncs   int    // files whose sync it waits for
	durable bool   // it ends once the disk has what it wrote
	synced  bool   // it has asked for those
}

type cursor = ownfiles.Cursor

// sort has the items follow the file.
func (j *job) sort() {
	if !slices.IsSortedFunc(j.Items, compare) {
		slices.SortFunc(j.Items, compare)
	}
}

func compare(a, b ownfiles.Item) int {
	switch {
	case a.View != b.View:
		return cmp.Compare(a.View, b.View)
	case a.Remote != b.Remote:
		return cmp.Compare(a.Remote, b.Remote)
	}
	return cmp.Compare(a.Index, b.Index)
}
