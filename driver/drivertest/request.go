// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// party is a side that takes orders: a host in this process, or one behind the
// pipes of the second process.
type party interface {
	do(request) reply
}

// request is one order. Which fields count depends on Do.
type request struct {
	Do       string
	Region   int           `json:",omitempty"`
	Peer     int           `json:",omitempty"`
	Off      uint64        `json:",omitempty"`
	Len      uint64        `json:",omitempty"`
	Seed     uint64        `json:",omitempty"`
	Remote   bool          `json:",omitempty"`
	ReadOnly bool          `json:",omitempty"`
	Decay    decay         `json:",omitempty"` // of an "add": the memory is to be spoilt
	Only     driver.Ranges `json:",omitempty"` // of a "slice"
	Parked   bool          `json:",omitempty"`
	Help     bool          `json:",omitempty"`
	Op       driver.Op     `json:",omitempty"`
	Tag      uint64        `json:",omitempty"`
	Descs    []driver.Desc `json:",omitempty"`
	Data     []byte        `json:",omitempty"` // an address, a token, bytes or a message
	Notify   bool          `json:",omitempty"`
	Answer   bool          `json:",omitempty"`
	Conn     uint64        `json:",omitempty"`
	Populate bool          `json:",omitempty"` // "open" for benchmarks
	Count    int           `json:",omitempty"`
	Tokens   [][]byte      `json:",omitempty"` // of memory that will be revoked
	Steady   [][]byte      `json:",omitempty"` // of memory that will not
	Lossy    bool          `json:",omitempty"` // connections may break
	Spot     string        `json:",omitempty"`
	Limit    time.Duration `json:",omitempty"`
}

// reply is the answer to one order.
type reply struct {
	ID       int         `json:",omitempty"` // of a region or a peer
	Key      uint32      `json:",omitempty"`
	Size     uint64      `json:",omitempty"`
	Tag      uint64      `json:",omitempty"`
	Count    int         `json:",omitempty"`
	Data     []byte      `json:",omitempty"`
	Messages []message   `json:",omitempty"`
	Faults   []string    `json:",omitempty"`
	Err      *relayError `json:",omitempty"`
}

// message is driver.Message on its way through a pipe.
type message struct {
	Conn uint64
	Data []byte      // nil and empty differ in JSON too
	Err  *relayError `json:",omitempty"`
}

// orders is what a party can do.
var orders = map[string]func(*host, request) (reply, error){
	"addr": func(h *host, _ request) (reply, error) { return reply{Data: h.b.Addr()}, nil },
	"add": func(h *host, q request) (reply, error) {
		id, err := h.add(q)
		return h.describe(id, err)
	},
	"spoil": func(h *host, q request) (reply, error) {
		return reply{}, h.region(q.Region).space.spoil()
	},
	"slice": func(h *host, q request) (reply, error) {
		id, err := h.slice(q.Region, q.Off, q.Len, q.Only)
		return h.describe(id, err)
	},
	"token": func(h *host, q request) (reply, error) {
		token, err := h.token(q.Region)
		return reply{Data: token}, err
	},
	"set": func(h *host, q request) (reply, error) {
		return reply{}, h.set(q.Region, q.Off, q.Data)
	},
	"paint": func(h *host, q request) (reply, error) {
		return reply{}, h.paint(q.Region, q.Off, q.Len, q.Seed)
	},
	"get": func(h *host, q request) (reply, error) {
		p, err := h.get(q.Region, q.Off, q.Len)
		return reply{Data: p}, err
	},
	"digest": func(h *host, q request) (reply, error) {
		p, err := h.view(q.Region, q.Off, q.Len)
		return reply{Data: digest(p)}, err
	},
	"again": func(h *host, q request) (reply, error) {
		id, err := h.again(q.Region)
		return h.describe(id, err)
	},
	"revoke": func(h *host, q request) (reply, error) {
		return reply{}, h.revoke(q.Region, q.Limit)
	},
	"revoke over": func(h *host, q request) (reply, error) {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		return reply{}, within(q.Limit, func() error {
			return h.region(q.Region).mem.Revoke(ctx)
		})
	},
	"give back": func(h *host, q request) (reply, error) {
		return reply{}, h.giveBack(q.Region, q.Limit)
	},
	"park":   func(h *host, q request) (reply, error) { return reply{}, h.parkMover(q.Spot) },
	"stands": func(h *host, q request) (reply, error) { return reply{}, h.stands(q.Limit) },
	"go on":  func(h *host, _ request) (reply, error) { h.goesOn(); return reply{}, nil },
	"storm":  func(h *host, q request) (reply, error) { return reply{}, h.storm(q) },
	"connect": func(h *host, q request) (reply, error) {
		id, err := h.connect(q.Data, q.Limit)
		return reply{ID: id}, err
	},
	"import": func(h *host, q request) (reply, error) {
		key, size, err := h.peer(q.Peer).Import(q.Data)
		return reply{Key: key, Size: size}, err
	},
	"submit": func(h *host, q request) (reply, error) {
		msg := q.Data
		if q.Notify && msg == nil {
			msg = []byte{}
		}
		tag, err := h.submit(q.Peer, q.Op, q.Descs, msg)
		return reply{Tag: tag}, err
	},
	"await": func(h *host, q request) (reply, error) {
		return reply{}, h.ledger.await(q.Tag, q.Limit)
	},
	"close peer": func(h *host, q request) (reply, error) {
		return reply{}, within(q.Limit, h.peer(q.Peer).Close)
	},
	"close backend": func(h *host, q request) (reply, error) {
		return reply{}, within(q.Limit, h.b.Close)
	},
	"receive": func(h *host, q request) (reply, error) {
		msgs, err := h.receive(q.Count, q.Limit)
		return reply{Messages: msgs}, err
	},
	"listen": func(h *host, q request) (reply, error) {
		msgs, err := h.listen(q.Count, q.Limit)
		return reply{Messages: msgs}, err
	},
	"verify": func(h *host, q request) (reply, error) { return h.verify(q.Count, q.Limit) },
	"answer": func(h *host, q request) (reply, error) {
		return reply{}, h.answer(q.Conn, q.Data, q.Limit)
	},
	"answers": func(h *host, q request) (reply, error) {
		return reply{}, h.startChore(q, (*host).answers)
	},
	"await parked": func(h *host, q request) (reply, error) {
		return reply{}, h.awaitParked(q.Limit)
	},
	"fill answers": func(h *host, q request) (reply, error) {
		n, err := h.fillAnswers(q)
		return reply{Count: n}, err
	},
	"flood": func(h *host, q request) (reply, error) {
		return reply{}, h.startChore(q, (*host).flood)
	},
	"echo": func(h *host, q request) (reply, error) {
		return reply{}, h.startChore(q, (*host).echo)
	},
	"scribble": func(h *host, q request) (reply, error) {
		return reply{}, h.startChore(q, (*host).scribble)
	},
	"calm": func(h *host, _ request) (reply, error) { // ends a chore
		o, err := h.endChore(0)
		return reply{Count: o.count, Faults: o.faults}, err
	},
	"ended": func(h *host, q request) (reply, error) { // waits until one ends by itself
		o, err := h.endChore(q.Limit)
		return reply{Count: o.count, Faults: o.faults}, err
	},
}

// do obeys one order.
func (h *host) do(q request) (r reply) {
	f, ok := orders[q.Do]
	if !ok {
		return reply{Err: relay(fmt.Errorf("unknown order %q", q.Do))}
	}
	r, err := f(h, q)
	r.Err = relay(err)
	return r
}

// describe answers with the number, the key and the token of a new region.
func (h *host) describe(id int, err error) (reply, error) {
	if err != nil {
		return reply{}, err
	}
	token, err := h.token(id)
	return reply{ID: id, Key: h.region(id).mem.Key(), Data: token}, err
}
