// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
)

// Poll implements driver.Backend. It looks at memory that the workers share with
// us. A caller that finds nothing and comes again at once waits: it moves the workers itself,
// which saves waking their threads.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	ended := b.ended.Load() // before the look: what is found missing then is missing for good
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

// collect takes what is in the rings, without a crossing into C.
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
	said := b.words.Arm()
	return b.net.Arm() || said, nil
}

// wake signals the event for news that is not in a ring of C.
func (b *Backend) wake() {
	if b.words.Disarm() {
		_, _ = unix.Write(b.event, one) // full only when it is signalled already
	}
}

// one is what a signal adds, in the byte order of this machine.
var one = binary.NativeEndian.AppendUint64(nil, 1)

// Receive implements driver.Backend. A connection's last message waits until
// the rings were seen empty after its end was known: then all messages before it
// are out.
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

// gather takes messages out of the rings, and then the last words of connections.
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
	clear(b.leaving) // keep no connection alive
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
