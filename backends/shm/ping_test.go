// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestFullRingOfASilentOwner: an owner takes bytes for ever, but once notifications fill its ring
// it is lost if it gives no sign of life within Failure. An owner that lives, and whose program
// does not take them, keeps its peers waiting for room.
func TestFullRingOfASilentOwner(t *testing.T) {
	clock := testkit.NewClock()
	owner, b := open(t, Config{}), openBy(t, clock, Config{RingBytes: ringBytesMin})
	far, _ := share(t, owner, drivertest.HostMemory, 4096)
	m, _ := share(t, b, drivertest.HostMemory, 4096)
	p := dial(t, b, owner.Addr())
	key := importOf(t, p, far)
	failure := b.cfg.Failure
	notify := &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail, Notify: make([]byte, 20<<10)}
	var err error
	for err == nil {
		if err = p.Submit(1, notify); err == nil {
			require.NoError(t, await(t, b, 1))
		}
	}
	require.ErrorIs(t, err, driver.ErrFull)
	for range 12 { // it answers each time
		soon(t, "an answer", func() bool { return !p.asks() })
		clock.Advance(failure / 4)
		require.ErrorIs(t, p.Submit(1, notify), driver.ErrFull)
	}
	soon(t, "an answer", func() bool { return !p.asks() })

	p.saying.Lock() // no question reaches the owner any more
	defer p.saying.Unlock()
	clock.Advance(failure / 4)
	require.ErrorIs(t, p.Submit(1, notify), driver.ErrFull)
	require.NoError(t, p.Submit(2, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 4096, LocalKey: m.Key(), RemoteKey: key}}}))
	require.NoError(t, await(t, b, 2))
	clock.Advance(failure - 1)
	time.Sleep(20 * time.Millisecond)
	require.ErrorIs(t, p.Submit(1, notify), driver.ErrFull)
	clock.Advance(1)
	<-p.Lost()
	require.ErrorIs(t, p.Submit(1, notify), driver.ErrPeerLost)
}

// asks reports whether a question is under way.
func (p *peer) asks() bool {
	p.ping.mu.Lock()
	defer p.ping.mu.Unlock()
	return p.ping.timer != nil
}
