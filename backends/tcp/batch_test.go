// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// A batch that is over keeps small slices for the next, and no large one: there may be a thousand
// such batches for as long as the backend is open.
func TestBatchKeepsNoLargeSlices(t *testing.T) {
	const run = 16
	owner, near := open(t, Config{}), open(t, Config{})
	m, _ := share(t, owner, run)
	l, _ := share(t, near, run)
	other, _ := share(t, near, run)
	p := dial(t, near, owner.Addr())
	key := importKey(t, p, m)
	slots := func(n int) *driver.Batch {
		side := driver.Side{Stride: run, List: make([]uint32, n/2)}
		return &driver.Batch{Op: driver.Read, Pattern: &driver.Pattern{LocalKey: l.key,
			RemoteKey: key, Run: run, Count: n / 2, Local: side, Remote: side}}
	}
	descs := func(n int) *driver.Batch { // with as many views, and a message
		b := &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail, Notify: make([]byte, n)}
		for i := range n {
			from := l
			if i%2 > 0 {
				from = other
			}
			b.Descs = append(b.Descs, driver.Desc{Len: 1, LocalKey: from.key, RemoteKey: key})
		}
		return b
	}
	text := &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
		Notify: make([]byte, messageKept+1)}
	for i, b := range []*driver.Batch{slots(100), slots(slotsKept + 2), descs(descsKept),
		descs(descsKept + 1), text} {
		require.NoError(t, p.Submit(uint64(i), b))
		require.NoError(t, await(t, near, uint64(i)))
		require.Len(t, near.batches.free, 1, "batches that wait to be used again")
		x := near.batches.free[0]
		require.LessOrEqual(t, cap(x.descs), descsKept)
		require.LessOrEqual(t, cap(x.slots), slotsKept)
		require.LessOrEqual(t, cap(x.pairs), pairsKept)
		require.LessOrEqual(t, cap(x.msg), messageKept)
		if i == 0 {
			require.NotZero(t, cap(x.slots), "a list that is small enough")
		}
	}
}
