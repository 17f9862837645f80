// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// TestNotificationsBesideCopies has goroutines that notify without bytes beside others that copy:
// each batch completes once, the copies not before their time.
func TestNotificationsBesideCopies(t *testing.T) {
	const each = 6000
	onStandIn(t)
	r := newRig(t, testConfig())
	l, d := r.memory(drivertest.HostMemory, 1<<20), r.memory(hbm, 1<<20)
	var all sync.WaitGroup
	var next atomic.Uint64
	submit := func(b *driver.Batch) {
		for range each {
			tag := next.Add(1)
			for {
				err := r.p.Submit(tag, b)
				if err == nil {
					break
				}
				if !errors.Is(err, driver.ErrFull) {
					t.Errorf("submit: %v", err)
					return
				}
				runtime.Gosched()
			}
		}
	}
	for range 2 {
		all.Go(func() {
			submit(&driver.Batch{Op: driver.Write, Tail: driver.NotifyTail, Notify: []byte("x")})
		})
		all.Go(func() {
			submit(&driver.Batch{Op: driver.Write, Descs: []driver.Desc{{Len: 4096,
				LocalKey: l.m.key, RemoteKey: d.key}}})
		})
	}
	seen := make([]int, 4*each+1)
	var done [64]driver.Completion
	var messages [64]driver.Message
	for n := 0; n < 4*each; {
		got, err := r.b.Poll(done[:])
		require.NoError(t, err)
		for _, c := range done[:got] {
			require.NoError(t, c.Err)
			seen[c.Tag]++
			require.Equal(t, 1, seen[c.Tag], "tag %d", c.Tag)
		}
		n += got
		_, err = r.b.Receive(messages[:])
		require.NoError(t, err)
		runtime.Gosched()
	}
	all.Wait()
}
