// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"maps"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
)

// end is our end of a connection. Its methods are called by the control goroutine,
// and must not block.
type end interface {
	number() uint64 // of the connection, as the program knows it
	heard(message any)
	lost(over bool) // the peer is given up; over: it has ended its end itself
	there() *address
	over(f func(link)) // calls f, unless the link is gone
}

func (b *Backend) add(id uint64, e end) {
	b.endsMu.Lock()
	b.ends[id] = e
	b.used.Store(int64(len(b.ends)))
	b.endsMu.Unlock()
}

func (b *Backend) remove(id uint64) {
	b.endsMu.Lock()
	delete(b.ends, id)
	b.used.Store(int64(len(b.ends)))
	b.endsMu.Unlock()
}

func (b *Backend) end(id uint64) end {
	b.endsMu.RLock()
	defer b.endsMu.RUnlock()
	return b.ends[id]
}

// allEnds lists the ends by what peers put into their messages.
func (b *Backend) allEnds() map[uint64]end {
	b.endsMu.RLock()
	defer b.endsMu.RUnlock()
	return maps.Clone(b.ends)
}

// inbound lists the connections of others to us.
func (b *Backend) inbound() (list []*inbound) {
	b.endsMu.RLock()
	defer b.endsMu.RUnlock()
	for _, c := range b.inbounds {
		list = append(list, c)
	}
	return list
}

// attend handles control messages until the event is closed.
func (b *Backend) attend() {
	for b.control.Wait() == nil {
		for {
			m, ok := b.net.Control()
			if !ok {
				break
			}
			b.handle(&m)
		}
	}
}

// handle passes a message on. What cannot be read is dropped: a peer of another
// version gets no answer, and its Connect ends with its context.
func (b *Backend) handle(m *ucp.Control) {
	var e end
	if m.Conn != 0 {
		if e = b.end(m.Conn); e == nil {
			return // for an end that is gone
		}
	}
	if m.Lost {
		if e != nil {
			e.lost(m.Over)
		}
		return
	}
	message, err := decodeControl(m.Data)
	switch {
	case err != nil:
	case e != nil:
		e.heard(message)
	default:
		b.unconnected(m.Worker, message)
	}
}

// unconnected handles a message that a peer sent to no end of ours: it begins a connection, or ends
// one whose beginning it has given up.
func (b *Backend) unconnected(worker int, message any) {
	switch m := message.(type) {
	case *hello:
		b.greet(worker, m)
	case *bye:
		if c := b.inboundOf(inboundID{m.from, m.conn}); c != nil {
			c.heard(m)
		}
	}
}
