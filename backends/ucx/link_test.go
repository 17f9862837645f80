// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
)

// fakeLink is one end of a connection of fakeNet.
type fakeLink struct {
	net        *fakeNet
	id         uint64
	worker, at int
	to         *fakeNet

	credits int  // net.mu
	starved bool // net.mu

	mu      sync.Mutex
	more    sync.Cond
	listed  []driver.Desc // what submit looks at
	peer    uint64
	queue   []*fakeBatch
	busy    bool // run has a batch in hand
	slots   []*ucp.Import
	refs    []int
	drained bool
	ended   bool
	status  int32
	closed  bool
	silent  bool // nothing arrives, as at a frozen peer
	heard   time.Duration
	waited  time.Duration
	givenUp bool
	stopped chan struct{}
}

// fakeBatch is a batch, or a control message.
type fakeBatch struct {
	op        driver.Op
	tag       uint64
	descs     []driver.Desc
	remotes   []*ucp.Import
	msg       []byte
	tail      driver.Tail
	control   bool
	cancelled bool
}

const fakePiece = 64 << 10

// Silence implements link.
func (l *fakeLink) Silence() (heard, waited time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.heard, l.waited
}

// GiveUp implements link.
func (l *fakeLink) GiveUp() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.givenUp = true
}

func (l *fakeLink) ID() uint64 { return l.id }
func (l *fakeLink) Lanes() string {
	return "#\n# lane[0]: 0:tcp/lo.0 md[0] -> md[0]/tcp/sysdev[255]\n" +
		"# lane[1]: 1:fake/memory.0 md[1] -> md[1]/fake/sysdev[255] am am_bw\n# am_send: 0..(inf)\n"
}

func (l *fakeLink) Gate() ucp.Gate { return ucp.Gate{At: l.id, Mark: [16]byte{1}} }

func (l *fakeLink) Bind(there ucp.Peer) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.peer = there.ID
	if l.net.cfg.Pull && (there.PID != os.Getpid() || there.Gate.Mark != [16]byte{1}) {
		return fmt.Errorf("told of process %d and gate %v", there.PID, there.Gate)
	}
	return nil
}

func (l *fakeLink) Pulls() error {
	if !l.net.cfg.Pull {
		return driver.ErrNotSupported
	}
	return l.net.refusal
}

func (l *fakeLink) Control(msg []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return driver.ErrClosed
	}
	l.queue = append(l.queue, &fakeBatch{control: true, msg: slices.Clone(msg)})
	l.more.Broadcast()
	return nil
}

func (l *fakeLink) Import(m ucp.Import) (uint32, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.slots {
		if l.slots[i] == nil {
			l.slots[i] = &m
			return uint32(i), nil
		}
	}
	l.slots = append(l.slots, &m)
	return uint32(len(l.slots) - 1), nil
}

func (l *fakeLink) Drop(slot uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slots[slot] = nil
}

func (l *fakeLink) Direct(uint32) bool { return false }

func (l *fakeLink) Submit(tag uint64, b *driver.Batch) error {
	p := b.Pattern
	if p == nil {
		return l.submit(tag, b, len(b.Descs), func(i int) driver.Desc { return b.Descs[i] })
	}
	l.mu.Lock()
	remote := l.imported(p.RemoteKey)
	l.mu.Unlock()
	local := l.net.memory(p.LocalKey)
	if remote == nil || local == nil {
		return driver.ErrBounds
	}
	if err := p.Check(uint64(len(local.bytes)), remote.Size); err != nil {
		return err
	}
	return l.submit(tag, b, p.Count*p.Runs(), func(i int) driver.Desc { return runOf(p, i) })
}

// runOf returns run i of a pattern.
func runOf(p *driver.Pattern, i int) driver.Desc {
	d, in := p.Desc(i/p.Runs()), uint64(i%p.Runs())
	for k := len(p.Loops) - 1; k >= 0; k-- {
		n := uint64(p.Loops[k].N)
		d.Local += in % n * p.Loops[k].Local
		d.Remote += in % n * p.Loops[k].Remote
		in /= n
	}
	return d
}

func (l *fakeLink) Notify(msg []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.drained || l.ended {
		return driver.ErrClosed
	}
	l.net.mu.Lock()
	if l.credits == 0 {
		l.starved = true
		l.net.mu.Unlock()
		return driver.ErrFull
	}
	l.credits--
	l.net.mu.Unlock()
	l.deliver(&fakeBatch{tail: driver.NotifyTail, msg: msg}, l.peer)
	return nil
}

func (l *fakeLink) imported(slot uint32) *ucp.Import {
	if uint64(slot) >= uint64(len(l.slots)) {
		return nil
	}
	return l.slots[slot]
}

// check looks at a batch. Preconditions: l.mu is held.
func (l *fakeLink) check(op driver.Op, descs []driver.Desc) error {
	if l.drained || l.ended {
		return driver.ErrClosed
	}
	for _, d := range descs {
		remote, local := l.imported(d.RemoteKey), l.net.memory(d.LocalKey)
		if remote == nil || local == nil {
			return driver.ErrBounds
		}
		if err := d.Check(uint64(len(local.bytes)), remote.Size); err != nil {
			return err
		}
		if op == driver.Write && remote.ReadOnly {
			return driver.ErrReadOnly
		}
	}
	return nil
}

func (l *fakeLink) submit(tag uint64, form *driver.Batch, n int, at func(int) driver.Desc) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listed = l.listed[:0]
	for i := range n {
		l.listed = append(l.listed, at(i)) // once: a list may change meanwhile
	}
	if err := l.check(form.Op, l.listed); err != nil {
		return err
	}
	l.net.mu.Lock()
	if l.net.taken == l.net.cfg.BatchesMax {
		l.net.mu.Unlock()
		return driver.ErrFull
	}
	if form.Tail == driver.NotifyTail && l.credits == 0 {
		l.starved = true
		l.net.mu.Unlock()
		return driver.ErrFull
	}
	if form.Tail == driver.NotifyTail {
		l.credits--
	}
	l.net.taken++
	b := l.net.batch()
	l.net.mu.Unlock()
	b.op, b.tag, b.tail, b.control, b.cancelled = form.Op, tag, form.Tail, false, false
	b.descs, b.remotes, b.msg = b.descs[:0], b.remotes[:0], append(b.msg[:0], form.Notify...)
	for _, d := range l.listed {
		b.descs = append(b.descs, d)
		b.remotes = append(b.remotes, l.imported(d.RemoteKey))
	}
	if n == 0 && len(l.queue) == 0 && !l.busy {
		l.deliver(b, l.peer)
		l.net.end(b, ucp.OK) // within Submit: nobody needs to be woken
		return nil
	}
	l.queue = append(l.queue, b)
	l.more.Broadcast()
	return nil
}

// deliver puts the notification of a batch into the other side's ring.
func (l *fakeLink) deliver(b *fakeBatch, peer uint64) {
	if b.tail == driver.NoTail {
		return
	}
	l.to.mu.Lock()
	l.to.notifs = append(l.to.notifs,
		fakeNotif{l, ucp.Notif{Conn: peer, Data: slices.Clone(b.msg)}})
	l.to.wake()
	l.to.mu.Unlock()
}

// run is the thread of this end.
func (l *fakeLink) run() {
	defer close(l.stopped)
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for (len(l.queue) == 0 || l.silent) && !l.closed {
			l.more.Wait()
		}
		if len(l.queue) == 0 || l.silent {
			return
		}
		b := l.queue[0]
		l.queue = append(l.queue[:0], l.queue[1:]...)
		l.busy = true
		peer := l.peer
		l.mu.Unlock()
		if b.control {
			l.to.push(ucp.Control{Worker: l.at, Conn: peer, Data: b.msg})
		} else {
			l.carry(b, peer)
		}
		l.mu.Lock()
		l.busy = false
		l.more.Broadcast()
	}
}

// carry runs a batch to its end.
func (l *fakeLink) carry(b *fakeBatch, peer uint64) {
	status := ucp.OK
	for i := range b.descs {
		if status = l.move(b, b.descs[i], b.remotes[i]); status != ucp.OK {
			break
		}
	}
	if status == ucp.OK && len(b.descs) == 0 {
		status = l.look(b)
	}
	l.net.mu.Lock()
	if b.tail == driver.NotifyTail && status != ucp.OK {
		l.credits++
	}
	l.net.mu.Unlock()
	if status == ucp.OK {
		l.deliver(b, peer)
	}
	l.net.complete(b, status)
}

// look returns why a batch ends early.
func (l *fakeLink) look(b *fakeBatch) int32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.ended:
		return l.status
	case l.drained:
		return ucp.Closed
	case b.cancelled:
		return ucp.Aborted
	}
	return ucp.OK
}

func (l *fakeLink) move(b *fakeBatch, d driver.Desc, remote *ucp.Import) int32 {
	local, there := l.net.memory(d.LocalKey), l.to.memory(remote.Key)
	for off := uint64(0); off < d.Len; off += fakePiece {
		if status := l.look(b); status != ucp.OK {
			return status
		}
		if there == nil {
			return ucp.Revoked
		}
		n := min(fakePiece, d.Len-off)
		there.mu.RLock()
		fits := there.ticket == remote.Ticket
		if fits && b.op == driver.Write {
			copy(there.bytes[d.Remote+off:][:n], local.bytes[d.Local+off:])
		} else if fits {
			copy(local.bytes[d.Local+off:][:n], there.bytes[d.Remote+off:])
		}
		there.mu.RUnlock()
		if !fits {
			return ucp.Revoked
		}
	}
	return ucp.OK
}

func (l *fakeLink) Cancel(tag uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range l.queue {
		if !b.control && b.tag == tag {
			b.cancelled = true
		}
	}
}

func (l *fakeLink) Help(uint64, <-chan struct{}) bool { return false }

// Drain waits until nothing is under way.
func (l *fakeLink) Drain(grace time.Duration) error {
	l.mu.Lock()
	l.drained = true
	l.mu.Unlock()
	return l.quiet(grace)
}

func (l *fakeLink) quiet(grace time.Duration) error {
	for end := time.Now().Add(grace); ; time.Sleep(20 * time.Microsecond) {
		l.mu.Lock()
		done := len(l.queue) == 0 && !l.busy || l.ended
		l.mu.Unlock()
		if done {
			return nil
		}
		if time.Now().After(end) {
			return driver.ErrTimeout
		}
	}
}

func (l *fakeLink) End(status int32, _ bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	l.ended, l.status = true, status
	kept := l.queue[:0]
	for _, b := range l.queue {
		if b.control {
			kept = append(kept, b)
			continue
		}
		l.net.complete(b, status)
	}
	l.queue = kept
	for l.busy {
		l.more.Wait()
	}
}

func (l *fakeLink) Close(grace time.Duration) error {
	l.End(ucp.Closed, true)
	l.mu.Lock()
	l.closed = true
	l.more.Broadcast()
	l.mu.Unlock()
	select {
	case <-l.stopped:
	case <-time.After(grace):
	}
	l.net.mu.Lock()
	delete(l.net.links, l.id)
	l.net.mu.Unlock()
	return nil
}
