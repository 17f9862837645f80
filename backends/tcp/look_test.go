// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"encoding/binary"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// TestPollerReads has a goroutine poll while the reader of the connection stands aside for good: it
// reads the acknowledgement itself, and allocates nothing.
func TestPollerReads(t *testing.T) {
	leak.Check(t)
	x := newLed(t)
	x.untilAside()
	x.p.mu.Lock() // so that nothing has the reader come back, not even a watch that is late
	l := &x.p.lead
	l.watch.Stop()
	l.watch, l.watching, l.seen = time.AfterFunc(time.Hour, func() {}), true, l.leads-1
	x.p.mu.Unlock()
	var done [1]driver.Completion
	for range 50 {
		tag := x.submit()
		require.NoError(t, await(t, x.b, tag))
	}
	if aside, _, _ := x.state(); !aside {
		t.Fatal("the reader came back")
	}
	each := testing.AllocsPerRun(100, func() {
		if n, err := x.b.Poll(done[:]); n != 0 || err != nil {
			t.Fatal("a completion that was not asked for: ", n, err)
		}
	})
	require.Zero(t, each, "allocations of a poller that reads in vain")
}

// TestPollersReadBesideReaders has both ends spin: each message comes once, in its order, whether
// the reader of its connection or the goroutine that polls read it.
func TestPollersReadBesideReaders(t *testing.T) {
	leak.Check(t)
	cfg := Config{Grace: 20 * time.Millisecond} // so that frames are held on a busy machine
	left, right := open(t, cfg), open(t, cfg)
	there, back := dial(t, left, right.Addr()), dial(t, right, left.Addr())
	const rounds = 300
	tell := func(b *Backend, p *peer, i uint64) error {
		var done [1]driver.Completion
		batch := driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
			Notify: binary.LittleEndian.AppendUint64(nil, i)}
		end, err := time.Now().Add(limit), p.Submit(i, &batch)
		for err == driver.ErrFull && time.Now().Before(end) { // until there is room again
			runtime.Gosched()
			err = p.Submit(i, &batch)
		}
		for n := 0; err == nil && n == 0; {
			runtime.Gosched()
			if time.Now().After(end) {
				return driver.ErrTimeout
			}
			if n, err = b.Poll(done[:]); n > 0 {
				err = done[0].Err
			}
		}
		return err
	}
	hear := func(b *Backend, i uint64) {
		var msgs [2]driver.Message
		for end := time.Now().Add(limit); ; runtime.Gosched() {
			n, err := b.Receive(msgs[:])
			if err != nil || n > 1 || n == 1 && binary.LittleEndian.Uint64(msgs[0].Data) != i ||
				n == 0 && time.Now().After(end) {
				t.Errorf("message %d: %d came, first %x, %v", i, n, msgs[0].Data, err)
				return
			}
			if n == 1 {
				return
			}
		}
	}
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for i := uint64(1); i <= rounds && !t.Failed(); i++ {
			hear(right, i)
			if err := tell(right, back, i); err != nil {
				t.Error(err)
			}
		}
	}()
	for i := uint64(1); i <= rounds && !t.Failed(); i++ {
		if err := tell(left, there, i); err != nil {
			t.Error(err)
		}
		hear(left, i)
	}
	<-answered
}
