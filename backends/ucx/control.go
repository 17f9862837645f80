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
	onMessage(message any)
	onLost(over bool) // the peer is lost; over: its end of the connection is over
	remote() *address
	withLink(f func(link)) // calls f, unless the link is gone
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

// allEnds returns all ends by the id that peers put into their messages.
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

// handle passes a message to the end that it is for. A message that it cannot decode is dropped: a
// peer of another version gets no answer, and its Connect ends with its context.
func (b *Backend) handle(m *ucp.Control) {
	if m.Conn != 0 {
		e := b.end(m.Conn)
		if e == nil {
			return // that end has been removed
		}
		if m.Lost {
			e.onLost(m.Over)
		} else if message, err := decodeControl(m.Data); err == nil {
			e.onMessage(message)
		}
		return
	}
	// A message to no end: a hello begins a connection, a bye ends one that the peer gave up before
	// our welcome reached it.
	message, _ := decodeControl(m.Data)
	switch message := message.(type) {
	case *hello:
		b.onHello(m.Worker, message)
	case *bye:
		b.endsMu.RLock()
		c := b.inbounds[inboundID{message.from, message.conn}]
		b.endsMu.RUnlock()
		if c != nil {
			c.onMessage(message)
		}
	}
}
