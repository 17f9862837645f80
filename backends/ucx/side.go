// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/keys"
)

// side is one of the two contexts, near and far, with the ends of connections that are ours.
type side struct {
	b    *Backend
	net  fabric
	near bool
	turn atomic.Uint32 // which worker has the next connection
	used atomic.Int64  // ends

	probing atomic.Bool // by a task
	over    atomic.Bool // its queue is blocked: see suspect

	mu       sync.RWMutex
	ends     map[uint64]end         // by what peers put into their messages
	inbounds map[inboundID]*inbound // by what their hello said
}

// end is our end of a connection. Its methods are called by the control goroutine,
// and must not block.
type end interface {
	number() uint64 // of the connection, as the program knows it
	heard(message any)
	lost(over bool) // the peer is given up; over: it has ended its end itself
	there() *address
	over(f func(link)) // calls f, unless the link is gone
}

func newSide(b *Backend, net fabric, near bool) *side {
	return &side{b: b, net: net, near: near, ends: make(map[uint64]end),
		inbounds: make(map[inboundID]*inbound)}
}

func (l *side) String() string {
	if l.near {
		return "near"
	}
	return "far"
}

const blockedText = "the queue of shared memory of this backend is blocked, because a process " +
	"was killed or stopped " +
	"while it put a message there: open the backend anew"

// blocked names another cause of a peer's silence.
func (l *side) blocked() string {
	switch {
	case !l.near:
		return ""
	case l.over.Load():
		return ", and " + blockedText
	}
	return ", or its queue of shared memory is blocked by a process that was killed while it " +
		"sent: then open that backend anew"
}

// suspect looks, beside, whether messages still arrive over shared memory. A process that is killed
// while it puts a message into UCX's queue leaves a place there that UCX waits for. Then all near
// connections are lost, and new ones take the other context.
func (l *side) suspect() {
	if !l.near || l.over.Load() || !l.probing.CompareAndSwap(false, true) {
		return
	}
	began := l.b.tasks.Start(func() {
		defer l.probing.Store(false)
		if l.net.Blocked() {
			l.over.Store(true)
			l.divert()
			l.net.Condemn()
		}
	})
	if !began {
		l.probing.Store(false)
	}
}

// divert has all near peers connect by the other context from now on: what we send still arrives.
func (l *side) divert() {
	for _, c := range l.inbound() {
		c.say(detour{}.encode())
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, e := range l.ends {
		if p, ok := e.(*peer); ok && p.hold.Enter() {
			_ = p.link.Control(detour{}.encode()) // a peer that is lost needs none
			p.hold.Exit()
		}
	}
}

const (
	detoursMax = 4096           // backends that are remembered
	blockedFor = 24 * time.Hour // one that says that it is blocked: it must be opened anew
	silentFor  = time.Minute    // one that may have been stopped
)

// avoid has connections to a backend take the other context for a while.
func (b *Backend) avoid(o keys.Owner, d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.detours) >= detoursMax {
		clear(b.detours)
	}
	b.detours[o] = time.Now().Add(d)
}

func (b *Backend) avoids(o keys.Owner) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return time.Now().Before(b.detours[o])
}

// addresses lists those of our workers.
func (l *side) addresses() (list [][]byte) {
	for w := range l.b.cfg.Workers {
		list = append(list, l.net.Address(w))
	}
	return list
}

// workersOf lists those of another backend.
func (l *side) workersOf(a *address) [][]byte {
	if l.near {
		return a.near
	}
	return a.far
}

// sidesTo lists the ways to a backend, the best first.
func (b *Backend) sidesTo(a *address) (list []*side, err error) {
	shared := b.near != nil && len(a.near) > 0 && a.host == b.address.host
	far := b.far != nil && len(a.far) > 0
	if shared && !b.near.over.Load() && !(far && b.avoids(a.owner)) {
		list = append(list, b.near)
	}
	if far {
		list = append(list, b.far)
	}
	if len(list) > 0 {
		return list, nil
	}
	if shared {
		return nil, fmt.Errorf("%s: %w", blockedText, driver.ErrNoRoute)
	}
	where := "on another host, or apart by namespaces or user"
	if a.host == b.address.host {
		where = "on this host"
	}
	return nil, fmt.Errorf("%v is %s, and both sides have no transports for that in common: set "+
		"Config.Transports to all: %w",
		a, where, driver.ErrNoRoute)
}

func (l *side) add(id uint64, e end) {
	l.mu.Lock()
	l.ends[id] = e
	l.used.Store(int64(len(l.ends)))
	l.mu.Unlock()
}

func (l *side) remove(id uint64) {
	l.mu.Lock()
	delete(l.ends, id)
	l.used.Store(int64(len(l.ends)))
	l.mu.Unlock()
}

func (l *side) end(id uint64) end {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.ends[id]
}

// all lists the ends by what peers put into their messages.
func (l *side) all() map[uint64]end {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return maps.Clone(l.ends)
}

// inbound lists the connections of others to us.
func (l *side) inbound() (list []*inbound) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, c := range l.inbounds {
		list = append(list, c)
	}
	return list
}

// quit tells all peers that we close.
func (l *side) quit() {
	for _, c := range l.inbound() {
		c.say(quit{}.encode())
	}
}

// attend handles control messages until the event is closed.
func (b *Backend) attend() {
	for b.control.Wait() == nil {
		for _, l := range b.sides {
			for {
				m, ok := l.net.Control()
				if !ok {
					break
				}
				l.handle(&m)
			}
		}
	}
}

// handle passes a message on. What cannot be read is dropped: a peer of another
// version gets no answer, and its Connect ends with its context.
func (l *side) handle(m *ucp.Control) {
	var e end
	if m.Conn != 0 {
		if e = l.end(m.Conn); e == nil {
			return // for an end that is gone
		}
	}
	if m.Lost {
		if e != nil {
			e.lost(m.Over)
		}
		return
	}
	if m.Suspect {
		l.suspect()
		return
	}
	message, err := decodeControl(m.Data)
	switch {
	case err != nil:
	case e != nil:
		e.heard(message)
	default:
		l.unconnected(m.Worker, message)
	}
}

// unconnected handles what was sent to no end: the beginning of a connection, or the
// end of one whose beginning was given up.
func (l *side) unconnected(worker int, message any) {
	switch m := message.(type) {
	case *hello:
		l.greet(worker, m)
	case *bye:
		if c := l.inboundOf(inboundID{m.from, m.conn}); c != nil {
			c.heard(m)
		}
	}
}
