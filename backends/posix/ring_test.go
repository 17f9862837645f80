// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestCancelsLeaveRoom has cancels that the kernel has not taken, because their callers stand
// before the call: they never take the places of requests, and the ring goes on.
func TestCancelsLeaveRoom(t *testing.T) {
	const size = 8192
	f := newFile(t, t.TempDir(), size)
	r := newRig(t, Config{Path: PathRing, Depth: 2}, fileSegment(f, size), size)
	g := r.b.mover.(*ring)
	b := &driver.Batch{Op: driver.Read, Descs: []driver.Desc{{Len: size, LocalKey: r.local,
		RemoteKey: r.remote}}}
	for tag := range uint64(3) {
		r.b.flights.Mu.Lock()
		for range 4 * len(g.sqes) {
			g.cancel(&request{slot: 1, f: r.b.requests[0].f, kind: readInto})
		}
		waiting := int(g.tail - g.sq.head.Load())
		r.b.flights.Mu.Unlock()
		require.LessOrEqual(t, waiting, len(g.sqes)-2)
		require.Positive(t, waiting)
		require.NoError(t, r.p.Submit(tag, b))
		for end := time.Now().Add(30 * time.Second); ; {
			n, err := r.b.Poll(r.done[:])
			require.NoError(t, err)
			if n == 1 {
				require.NoError(t, r.done[0].Err)
				break
			}
			require.True(t, time.Now().Before(end), "a read does not end")
		}
	}
}
