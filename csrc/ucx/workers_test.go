// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// crowd moves bytes over one connection of a context of several workers, in a range of its own.
type crowd struct {
	*lane
	conn *Conn
	slot uint32
	from uint64
	done chan ring.Done
}

const crowdRange = testBytes / 8

// submit waits for a place.
func (c *crowd) submit(op driver.Op, tag uint64, msg []byte) error {
	d := []driver.Desc{{Local: c.from, Remote: c.from, Len: crowdRange, LocalKey: testKey,
		RemoteKey: c.slot}}
	for end := time.Now().Add(testLimit); ; {
		err := submit(c.conn, op, tag, d, msg)
		if !errors.Is(err, driver.ErrFull) || time.Now().After(end) {
			return err
		}
		time.Sleep(50 * time.Microsecond)
	}
}

func (c *crowd) run(t *testing.T, g uint64) {
	local, remote := c.local[c.from:][:crowdRange], c.remote[c.from:][:crowdRange]
	for i := range uint64(30) {
		op := driver.Op(1 + i%2)
		fill(local[:100], g*100+i)
		tag := g<<32 | i
		msg := []byte{byte(g)}
		if op == driver.Read {
			msg = nil
		}
		if err := c.submit(op, tag, msg); err != nil {
			t.Errorf("goroutine %d: %v", g, err)
			return
		}
		if i%3 == 0 {
			c.conn.Help(tag, nil)
		}
		select {
		case d := <-c.done:
			if err := Error(d); err != nil || d.Tag != tag {
				t.Errorf("goroutine %d: tag %x: %v", g, d.Tag, err)
			}
		case <-time.After(testLimit):
			t.Errorf("goroutine %d: tag %x does not complete", g, tag)
			return
		}
		if !bytes.Equal(local, remote) {
			t.Errorf("goroutine %d: other bytes", g)
		}
	}
}

func TestSeveralWorkers(t *testing.T) {
	c := overTCP
	c.Workers = 3
	l := openLane(t, c)
	crowds, names := make([]*crowd, 8), map[uint64]byte{}
	for i := range crowds {
		conn, back := joinWorkers(t, l.near, l.far, i%3, (i+1)%3)
		defer func() { _, _ = conn.Close(testGrace), back.Close(testGrace) }()
		slot, err := conn.Import(Import{Key: testKey, Size: testBytes, Ticket: 1})
		require.NoError(t, err)
		if _, twice := names[back.ID()]; twice {
			t.Fatal("two connections of one name on different workers")
		}
		names[back.ID()] = byte(i)
		crowds[i] = &crowd{lane: l, conn: conn, slot: slot, from: uint64(i) * crowdRange,
			done: make(chan ring.Done, 1)}
	}
	var stop atomic.Bool
	var pollers, movers sync.WaitGroup
	pollers.Go(func() {
		var done [8]ring.Done
		for !stop.Load() {
			for _, d := range done[:l.near.Poll(done[:])] {
				crowds[d.Tag>>32].done <- d
			}
			l.near.Drive()
		}
	})
	notifs := 0
	pollers.Go(func() {
		for !stop.Load() || notifs < 15*len(crowds) && !t.Failed() {
			if n, ok := l.far.Receive(); ok {
				notifs++
				if names[n.Conn] != n.Data[0] {
					t.Errorf("a message of %d came on the connection of %d", n.Data[0],
						names[n.Conn])
				}
			}
		}
	})
	for g, c := range crowds {
		movers.Go(func() { c.run(t, uint64(g)) })
	}
	movers.Wait()
	stop.Store(true)
	pollers.Wait()
}
