// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"crypto/rand"
	"sync/atomic"

	"github.com/sluicehq/sluice/internal/wire"
)

// Every message that an engine sends begins with one byte that says what it is. Requests
// go as notifications of a backend, answers come back by the connection of the request
// (driver.Backend.Answer). Integers are little-endian.
const (
	isNotification = 0 // bytes for the program
	isPart         = 1 // flags; a part of a notification that is too long for one message
	isHello        = 2 // version, engine, ticket, name: the first message of a connection

	isWindowAsk = 16 // give me staging memory
	isWindow    = 17 // the answer: slots, and a description of its region, or why not
	isPut       = 18 // a farHop: place what lies in the slot
	isGet       = 19 // a farHop: fetch into the slot
	isWithdrawn = 20 // slot, number: do not make that hop, or end it
	isHopEnd    = 21 // the answer to each of these: slot, number, outcome

	isSum    = 32 // tag, token, ranges: sum these
	isSummed = 33 // the answer: tag, outcome, sums
)

// A hello: kind, version, engine, ticket, then the name of the engine.
const (
	helloVersion = 1
	helloBytes   = 1 + 1 + len(wire.ID{}) + len(secret{})
)

// secret is 128 bits that an engine gives out to one peer alone.
type secret [16]byte

// ticket proves that a connection comes from the engine with which descriptions were
// exchanged (Serve, Dial): that engine alone has been given the secret, and shows it in the
// hello of each of its connections.
type ticket struct {
	secret  secret
	private bool                 // for a Peer that the program never has
	peer    atomic.Pointer[Peer] // once this engine has connected, too
}

// issueTicket makes a ticket for another engine, valid until revokeTicket.
func (e *Engine) issueTicket() *ticket {
	t := &ticket{}
	rand.Read(t.secret[:])
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tickets[t.secret] = t
	return t
}

func (e *Engine) revokeTicket(t *ticket) {
	if t == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.tickets, t.secret)
}

// bind makes the ticket stand for a Peer.
// Preconditions: e.mu is held.
func (t *ticket) bind(p *Peer) {
	p.ticket = t
	t.peer.Store(p)
}

// appendHello is the first message of each connection.
func (e *Engine) appendHello(b []byte, show secret) []byte {
	b = append(b, isHello, helloVersion)
	b = append(b, e.id[:]...)
	b = append(b, show[:]...)
	return append(b, e.cfg.Name...)
}

// parseHello reads a hello; ok: it is one.
func parseHello(b []byte) (id wire.ID, show secret, name string, ok bool) {
	if len(b) < helloBytes || len(b) > helloBytes+wire.NameMax ||
		b[0] != isHello || b[1] != helloVersion {
		return id, show, "", false
	}
	copy(id[:], b[2:])
	copy(show[:], b[2+len(id):])
	return id, show, string(b[helloBytes:]), true
}
