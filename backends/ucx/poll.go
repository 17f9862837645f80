// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
)

// Poll implements driver.Backend. It reads rings that C shares with Go. A caller that gets nothing
// from two calls in a row is waiting: Poll then makes the workers progress itself, which saves
// waking their threads.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	ended := b.ended.Load() // before collect: nothing is added to the rings after ended is set
	n := b.collect(done)
	if n == 0 && b.idle && !ended {
		b.drive()
		n = b.collect(done)
	}
	b.idle = n == 0
	if n == 0 && ended && len(done) > 0 {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// collect takes completions from the rings, without a cgo call.
func (b *Backend) collect(done []driver.Completion) (n int) {
	for n < len(done) {
		got := b.net.Poll(b.scratch[:min(len(b.scratch), len(done)-n)])
		if got == 0 {
			break
		}
		for _, d := range b.scratch[:got] {
			done[n] = driver.Completion{Tag: d.Tag, Err: ucp.Error(d)}
			n++
		}
	}
	return n
}

// drive makes the workers progress, unless there is no connection.
func (b *Backend) drive() {
	if b.used.Load() > 0 {
		b.net.Drive()
	}
}

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.event }

// Arm implements driver.Backend.
func (b *Backend) Arm() (ready bool, err error) {
	if b.gate.IsShut() {
		return false, driver.ErrClosed
	}
	lost := b.words.Arm() // connections that have ended
	return b.net.Arm() || lost, nil
}

// wake signals the event for ended connections; C signals the rest.
func (b *Backend) wake() {
	if b.words.Disarm() {
		proc.SignalFD(uintptr(b.event))
	}
}

// Receive implements driver.Backend. It reports the end of a connection only after it has found the
// rings empty since the end: then the program has received all messages of the connection.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	if b.gate.IsShut() {
		return 0, driver.ErrClosed
	}
	n := b.gather(msgs)
	if n == 0 && b.quiet {
		b.drive()
		n = b.gather(msgs)
	}
	b.quiet = n == 0
	return n, nil
}

// gather takes messages from the rings, and then ends of connections.
func (b *Backend) gather(msgs []driver.Message) (n int) {
	b.leaving = b.words.Pending(b.leaving[:0])
	for n < len(msgs) {
		notif, ok := b.net.Receive()
		if !ok {
			break
		}
		if e := b.end(notif.Conn); e != nil {
			msgs[n] = driver.Message{Conn: e.number(), Data: notif.Data}
			n++
		}
	}
	leaving := b.leaving[:min(len(b.leaving), len(msgs)-n)]
	for _, c := range leaving {
		msgs[n] = driver.Message{Conn: c.conn, Err: driver.ErrPeerLost}
		n++
		c.mu.Lock()
		c.reported = true
		c.mu.Unlock()
		c.removeIfOver()
	}
	if len(leaving) > 0 {
		b.words.Drop(len(leaving))
	}
	clear(b.leaving) // drop the references
	return n
}

// Answer implements driver.Backend.
func (b *Backend) Answer(conn uint64, msg []byte) error {
	if !b.gate.Enter() {
		return driver.ErrClosed
	}
	defer b.gate.Exit()
	if len(msg) > messageMax {
		return driver.ErrBounds
	}
	b.endsMu.RLock()
	c := b.accepted[conn]
	b.endsMu.RUnlock()
	if c == nil {
		return driver.ErrPeerLost
	}
	return c.answer(msg)
}
