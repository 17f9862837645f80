// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

// spots are where the suite parks batches.
var spots = map[string]spot{
	"announced": spotAnnounced, "good": spotGood, "shown": spotShown, "launched": spotLaunched,
	"ended": spotEnded, "judged": spotJudged,
}

func parkAt(name string, f func()) { parked.First(spots[name], f) }
