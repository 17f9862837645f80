// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import "sync/atomic"

// spots are where the suite parks batches.
var spots = map[string]spot{
	"announced": spotAnnounced, "good": spotGood, "shown": spotShown, "launched": spotLaunched,
	"ended": spotEnded, "judged": spotJudged,
}

func parkAt(name string, f func()) {
	if f == nil {
		parked.Store(nil)
		return
	}
	parkOne(spots[name], f)
}

// parkOne has the first batch that comes to a spot call f there.
func parkOne(where spot, f func()) {
	var came atomic.Bool
	do := func(s spot) {
		if s == where && !came.Swap(true) {
			f()
		}
	}
	parked.Store(&do)
}
