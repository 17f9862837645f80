// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"

	"github.com/sluicehq/sluice/engine"
)

// The first byte of a message says to which handler a Mux gives it.
const (
	toReceiver byte = 0xB3
	toSender   byte = 0xB4
)

const version = 1

// kind is the third byte of a message.
type kind uint8

const (
	kindBegin kind = 1 // to a receiver: fragment of a begin
	kindLayer kind = 2 // to a receiver: a layer is there
	kindDone  kind = 3 // to a receiver: all of it is there
	kindAbort kind = 4 // to a receiver: the sender has ended it, with a Reason
	kindGrant kind = 5 // to a sender: fragment of a grant
	kindTaken kind = 6 // to a sender: all of it is the receiver's
	kindEnd   kind = 7 // to a sender: the receiver has ended it, with a Reason
	kindAsk   kind = 8 // to a sender: what is the digest of this?
	kindSum   kind = 9 // to a receiver: the answer
)

// A message is: the handler, version, kind, a Reason or 0, the session (8 bytes),
// and the body. All numbers are little-endian.
const (
	headerLen   = 12
	fragmentLen = headerLen + 8 // total and offset, then bytes
)

// MessageMin is the least Config.MessageMax.
const MessageMin = 64

type message struct {
	kind    kind
	reason  Reason // of kindAbort and kindEnd
	session uint64
	layer   uint32 // of kindLayer
	total   uint32 // of kindBegin and kindGrant: length of the whole, at least 1
	offset  uint32 // where bytes belong in it
	bytes   []byte // part of what was decoded; of a layer of a group, its digest
}

func garbled(format string, args ...any) error {
	return fmt.Errorf("message: "+format+": %w", append(args, engine.ErrCorrupt)...)
}

// decode reads one message. What it returns refers to b. Of a broken body it returns the session
// and no kind, with which that session ends its request.
func decode(b []byte) (m message, err error) {
	if len(b) < headerLen {
		return m, garbled("%d bytes, cut short", len(b))
	}
	if b[1] != version {
		return m, fmt.Errorf("message of version %d, want %d: use the same release on "+
			"both sides: %w", b[1], version, engine.ErrVersion)
	}
	m = message{kind: kind(b[2]), reason: Reason(b[3]), session: binary.LittleEndian.Uint64(b[4:])}
	ends := m.kind == kindAbort || m.kind == kindEnd
	if ends != m.reason.valid() || !ends && m.reason != 0 {
		err = garbled("kind %d with reason %d", m.kind, m.reason)
	} else {
		err = m.decodeBody(b[0], b[headerLen:])
	}
	if err != nil {
		return message{session: m.session}, err
	}
	return m, nil
}

func (m *message) decodeBody(to byte, body []byte) error {
	receiver, sender := to == toReceiver, to == toSender
	switch {
	case receiver && m.kind == kindBegin, sender && m.kind == kindGrant:
		if len(body) <= fragmentLen-headerLen {
			return garbled("a fragment of %d bytes", len(body))
		}
		m.total, m.offset = binary.LittleEndian.Uint32(body), binary.LittleEndian.Uint32(body[4:])
		m.bytes = body[8:]
		if m.offset > m.total || uint64(len(m.bytes)) > uint64(m.total-m.offset) {
			return garbled("%d bytes at %d of %d", len(m.bytes), m.offset, m.total)
		}
		return nil
	case receiver && m.kind == kindLayer:
		if len(body) != 4 && len(body) != 4+digestLen {
			return garbled("a layer number of %d bytes", len(body))
		}
		m.layer, m.bytes = binary.LittleEndian.Uint32(body), body[4:]
		return nil
	case receiver && (m.kind == kindAbort || m.kind == kindDone),
		sender && (m.kind == kindEnd || m.kind == kindTaken):
		if len(body) != 0 {
			return garbled("%d bytes too much", len(body))
		}
		return nil
	case sender && m.kind == kindAsk, receiver && m.kind == kindSum:
		m.bytes = body
		return nil
	}
	return garbled("kind %d to %#x", m.kind, to)
}

func appendHeader(dst []byte, to byte, k kind, r Reason, session uint64) []byte {
	return binary.LittleEndian.AppendUint64(append(dst, to, version, byte(k), byte(r)), session)
}

func appendLayer(dst []byte, session uint64, layer int) []byte {
	return binary.LittleEndian.AppendUint32(appendHeader(dst, toReceiver, kindLayer, 0,
		session), uint32(layer))
}

// appendSum begins the answer to a question, which its digest follows.
func appendSum(dst []byte, session uint64, number uint32) []byte {
	return binary.LittleEndian.AppendUint32(appendHeader(dst, toReceiver, kindSum, 0,
		session), number)
}

// newSession draws a number that only the two sides know: it is what entitles a
// message to be heard, and it tells attempts at the same request apart.
func newSession() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:])
}

// assembly puts fragments together. They come in order, as messages of a peer
// do, and are refused where they do not.
type assembly struct {
	bytes []byte
	total uint32
	begun bool
}

// add takes a fragment, and reports whether it was the last one.
func (a *assembly) add(m *message, totalMax uint64) (bool, error) {
	switch {
	case !a.begun && uint64(m.total) > totalMax:
		return false, garbled("%d bytes announced, at most %d fit the request", m.total, totalMax)
	case a.begun && (m.total != a.total || len(a.bytes) == int(a.total)):
		return false, garbled("a fragment of another whole")
	case int(m.offset) != len(a.bytes):
		return false, garbled("a fragment at %d, want %d", m.offset, len(a.bytes))
	}
	a.begun, a.total = true, m.total
	a.bytes = append(a.bytes, m.bytes...)
	return len(a.bytes) == int(a.total), nil
}

// sendFragments sends a whole in messages of at most max bytes.
func sendFragments(ctx context.Context, p *engine.Peer, to byte, k kind, session uint64,
	whole []byte, max int) error {
	msg := make([]byte, 0, min(max, fragmentLen+len(whole)))
	for off := 0; off < len(whole); {
		n := min(max-fragmentLen, len(whole)-off)
		msg = appendHeader(msg[:0], to, k, 0, session)
		msg = binary.LittleEndian.AppendUint32(msg, uint32(len(whole)))
		msg = binary.LittleEndian.AppendUint32(msg, uint32(off))
		msg = append(msg, whole[off:off+n]...)
		if err := p.Notify(ctx, msg); err != nil {
			return err
		}
		off += n
	}
	return nil
}
