// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestDriftOfTwoClocks: the owner's clock loses 1,000 ppm against the initiator's for as long as
// that goes by one answer. Bytes that the owner has read, and that wait for the memory's gate, do
// not land once the initiator has given them up.
func TestDriftOfTwoClocks(t *testing.T) {
	testkit.CheckLeaks(t)
	const n = 4096
	here, there := testkit.NewClock(), testkit.NewClock()
	there.Advance(17 * time.Hour) // each host has its own
	pass := func(d time.Duration) {
		here.Advance(d)
		there.Advance(d - d/1000)
	}
	owner, near := openBy(t, there, Config{}), openBy(t, here, Config{CloseMax: time.Millisecond})
	m, away := share(t, owner, n)
	l, local := share(t, near, n)
	for _, quiet := range []time.Duration{0, time.Second, 59 * time.Second, 2 * time.Minute} {
		fill(local, 1)
		p := dial(t, near, owner.Addr())
		key := importKey(t, p, m)
		d := []driver.Desc{{Len: n, LocalKey: l.key, RemoteKey: key}}
		require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
		require.NoError(t, await(t, near, 1)) // the initiator knows the owner's clock
		for range 100 {
			pass(quiet / 100)
		}
		fill(local, 0xEE)
		m.gate.Lock()
		require.NoError(t, p.Submit(2, &driver.Batch{Op: driver.Write, Descs: d}))
		var reader *inbound
		for reader = range acceptedBy(owner) {
		}
		for express := reader.conns[express]; express.landMu.TryLock(); runtime.Gosched() {
			express.landMu.Unlock() // until it has the bytes, and waits
		}
		closed := make(chan error, 1)
		go func() { closed <- p.Close() }()
		for len(closed) == 0 {
			pass(time.Millisecond)
			time.Sleep(time.Millisecond) // no goroutine is late while the process stands still
		}
		require.NoError(t, <-closed)
		require.ErrorIs(t, await(t, near, 2), driver.ErrClosed, quiet)
		m.gate.Unlock()
		for len(acceptedBy(owner)) > 0 { // all that it had to read is dealt with
			time.Sleep(time.Millisecond)
		}
		unchanged(t, away, 0, "after Close, behind a pause of "+quiet.String())
	}
}
