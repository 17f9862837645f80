// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"encoding/binary"

	"github.com/sluicehq/sluice/engine"
)

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

// messageBytes returns how many bytes sendFragments sends for a whole of n.
func messageBytes(n, max int) int {
	part := max - fragmentLen
	return n + (n+part-1)/part*fragmentLen
}
