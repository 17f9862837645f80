// SPDX-License-Identifier: Apache-2.0

// Package exchange is what engines say to each other: the forms of their messages. It reads what a
// peer may have made up, and bounds it; what a message asks for is the engine's to allow and to do.
//
// Every message begins with one byte that says what it is. Requests go as notifications of a
// backend, answers come back by the connection of the request (driver.Backend.Answer). Integers are
// little-endian.
package exchange

import "github.com/sluicehq/sluice/internal/wire"

// What a message is.
const (
	IsNotification = 0 // bytes for the program
	IsPart         = 1 // flags; a part of a notification that is too long for one message
	IsHello        = 2 // a Hello: the first message of a connection

	IsWindowAsk = 16 // give me staging memory
	IsWindow    = 17 // the answer: slots, and a description of its region, or why not
	IsPut       = 18 // a Hop: place what lies in the slot
	IsGet       = 19 // a Hop: fetch into the slot
	IsWithdrawn = 20 // slot, number: do not make that hop, or end it
	IsHopEnd    = 21 // the answer to each of these: slot, number, outcome
)

// The flags of a part.
const (
	FirstPart = 1
	LastPart  = 2
	PartHead  = 2 // kind and flags
)

// Secret is 128 bits that an engine gives out to one peer alone.
type Secret [16]byte

// Hello begins a connection.
type Hello struct {
	ID   wire.ID
	Show Secret // of the ticket that the sender was given; zero: of none
	Name string // of the engine, by its own account
}

// helloBytes is a hello without its name: kind, version, engine, secret.
const (
	helloVersion = 2
	helloBytes   = 1 + 1 + len(wire.ID{}) + len(Secret{})
)

// Append appends the message.
func (h *Hello) Append(b []byte) []byte {
	b = append(b, IsHello, helloVersion)
	b = append(b, h.ID[:]...)
	b = append(b, h.Show[:]...)
	return append(b, h.Name...)
}

// ParseHello reads a message; ok: it is a hello.
func ParseHello(b []byte) (h Hello, ok bool) {
	if len(b) < helloBytes || len(b) > helloBytes+wire.NameMax || b[0] != IsHello ||
		b[1] != helloVersion {
		return h, false
	}
	copy(h.ID[:], b[2:])
	copy(h.Show[:], b[2+len(h.ID):])
	h.Name = string(b[helloBytes:])
	return h, wire.CheckName(h.Name) == nil
}
